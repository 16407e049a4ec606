#include "slow_call.h"

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

constexpr Clock::duration kFirstReport = 1s, kBetweenLooks = 1s;
constexpr std::size_t kMostNamed = 4;
constexpr std::uint64_t kEnough = 64 << 10;  // bytes that tell how fast a connection is

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

void SlowCall::begin(const Call& call, std::chrono::milliseconds timeout) {
    call_ = call;
    timeout_ = timeout;
    began_ = Clock::now();
    measured_ = {};
    is_over_ = false;
}

void SlowCall::look(Transport& transport, const Membership& membership) {
    if (is_over_) return;
    const auto now = Clock::now();
    if (measured_ == Clock::time_point{}) {
        measured_ = now;
        next_look_ = std::max<Clock::time_point>(began_ + timeout_ / 10, now + kFirstReport);
        before_ = transport.delivered();
    }
    if (now < next_look_) return;
    next_look_ = now + kBetweenLooks;
    const auto time = std::chrono::duration_cast<std::chrono::microseconds>(now - began_);
    const std::string rates = text(transport.delivered(), time, membership);
    if (rates.empty()) return;
    is_over_ = true;
    const auto seconds = [](Clock::duration time) {
        return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
    };
    if (may_print(now, timeout_))
        std::cerr << "dist_prims: " + membership.own_name() + ": " + call_.text() + ": " + seconds(now - began_) +
                         " so far, the timeout is " + seconds(timeout_) + "; " + rates + "\n";
}

// What this rank has delivered since before_, the slowest connection first; empty if no connection had bytes to deliver
// for half of the time of the call, or if one of them has delivered too little to tell its rate. Of the other
// connections all deliveries count, since most are older than before_, and they are named if they were faster.
std::string SlowCall::text(const Delivered& now, std::chrono::microseconds time, const Membership& membership) const {
    std::vector<std::pair<double, int>> busy;  // rates and ranks
    Transport::Delivered others;
    for (const auto& [peer, all] : now) {
        const auto found = before_.find(peer);
        const Transport::Delivered before = found == before_.end() ? Transport::Delivered{} : found->second;
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
    std::sort(busy.begin(), busy.end());
    std::string text;
    for (std::size_t each = 0; each < std::min(busy.size(), kMostNamed); ++each)
        text += (each ? ", " : "") + membership.title(busy[each].second) + " gets " + rate(busy[each].first);
    if (busy.size() > kMostNamed) text += ", " + std::to_string(busy.size() - kMostNamed) + " more";
    const double of_others = others.bytes < kEnough ? 0 : megabytes_per_second_of(others);
    if (of_others > busy.back().first) text += ", others " + rate(of_others) + " on average,";
    return text + " from this rank";
}

}  // namespace dist_prims
