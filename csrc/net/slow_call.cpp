#include "slow_call.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <iostream>
#include <utility>
#include <vector>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr Clock::duration kFirstLook = 100ms, kFirstReport = 1s, kBetweenLooks = 1s;
constexpr std::size_t kMostNamed = 4;
constexpr std::uint64_t kEnough = 64 << 10;  // bytes that tell how fast a connection is

// Which file descriptor 2 is: device and inode; none if it is closed.
std::optional<std::pair<std::uint64_t, std::uint64_t>> file_of_stderr() {
    struct stat status{};
    if (::fstat(2, &status) != 0) return std::nullopt;
    return std::pair(status.st_dev, status.st_ino);
}

double megabytes_per_second_of(const Transport::Delivered& delivered) {
    return static_cast<double>(delivered.bytes) / std::max(1.0, static_cast<double>(delivered.time.count()));
}

std::string rate(double megabytes_per_second) {
    std::array<char, 32> text;
    const int digits = megabytes_per_second < 1 ? 2 : megabytes_per_second < 10 ? 1 : 0;
    std::snprintf(text.data(), text.size(), "%.*f MB/s", digits, megabytes_per_second);
    return text.data();
}

// Whether no line has been printed by this process within the timeout.
bool may_print(Clock::time_point now, std::chrono::milliseconds timeout) {
    static std::atomic<Clock::rep> next{0};
    Clock::rep earliest = next.load();
    const Clock::rep count = now.time_since_epoch().count();
    return count >= earliest && next.compare_exchange_strong(earliest, count + Clock::duration(timeout).count());
}

}  // namespace

SlowCall::SlowCall() : stderr_at_start_(file_of_stderr()) {}

void SlowCall::begin(const Call& call, std::chrono::milliseconds timeout) {
    call_ = call;
    timeout_ = timeout;
    began_ = Clock::now();
    next_look_ = began_ + kFirstLook;
    before_.reset();
    is_over_ = false;
}

void SlowCall::look(Transport& transport, const Membership& membership) {
    if (is_over_) return;
    const auto now = Clock::now();
    if (now < next_look_) return;
    // 1. The first look only reads what has been delivered. It takes a system call a connection: short calls end
    // earlier.
    if (!before_) {
        next_look_ = std::max<Clock::time_point>(began_ + timeout_ / 10, now + kFirstReport);
        before_ = transport.delivered();
        return;
    }
    // 2. Later looks compare.
    next_look_ = now + kBetweenLooks;
    const auto time = std::chrono::duration_cast<std::chrono::microseconds>(now - began_);
    const std::string text = rates(transport.delivered(), time, membership);
    if (text.empty()) return;
    is_over_ = true;
    const auto seconds = [](Clock::duration time) {
        return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
    };
    if (stderr_at_start_ && file_of_stderr() == stderr_at_start_ && may_print(now, timeout_))
        std::cerr << "dist_prims: " + membership.own_name() + ": " + call_.text() + ": " + seconds(now - began_) +
                         " so far, the timeout is " + seconds(timeout_) + "; " + text + "\n";
}

// What this rank has delivered since before_, the slowest connection first; empty if no connection had bytes to deliver
// for half of the time of the call, or if one of them has delivered too little to tell its rate. Of the other
// connections all deliveries count, since most are older than before_, and they are named if they were faster.
std::string SlowCall::rates(const Delivered& now, std::chrono::microseconds time, const Membership& membership) const {
    // 1. Divide the connections into those that had bytes to deliver for half of the time, and the others.
    std::vector<std::pair<double, int>> busy;  // rates and ranks
    Transport::Delivered others;
    for (const auto& [peer, all] : now) {
        const auto known = before_->find(peer);
        const Transport::Delivered before = known == before_->end() ? Transport::Delivered{} : known->second;
        const Transport::Delivered delivered{all.bytes - before.bytes, all.time - before.time};
        if (delivered.time < time / 2) {
            others.bytes += all.bytes;
            others.time += all.time;
        } else if (delivered.bytes < kEnough) {
            return "";
        } else {
            busy.emplace_back(megabytes_per_second_of(delivered), peer);
        }
    }
    if (busy.empty()) return "";
    // 2. Name the slowest, and compare them with the others.
    std::sort(busy.begin(), busy.end());
    std::string text;
    for (std::size_t index = 0; index < std::min(busy.size(), kMostNamed); ++index)
        text += (index ? ", " : "") + membership.title(busy[index].second) + " gets " + rate(busy[index].first);
    if (busy.size() > kMostNamed) text += ", " + std::to_string(busy.size() - kMostNamed) + " more";
    const double of_others = others.bytes < kEnough ? 0 : megabytes_per_second_of(others);
    if (of_others > busy.back().first) text += ", others " + rate(of_others) + " on average,";
    return text + " from this rank";
}

}  // namespace dist_prims
