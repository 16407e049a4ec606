#include "mail.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kAllLanes = 1 << 20;  // bytes of the lanes to one rank
constexpr std::size_t kLeast = 16 << 10, kMost = 256 << 10;
constexpr std::size_t kPiece = 32 << 10;  // after so many bytes the other side may begin
constexpr auto kGrace = 100us;            // who posts a letter mostly waits for it soon

struct Header {
    alignas(Peers::kLine) Mail::Tag tag;
    std::uint64_t bytes;
};

std::size_t ring_bytes_for(int size) {
    return std::clamp(kAllLanes / static_cast<std::size_t>(size), kLeast, kMost) / Peers::kLine * Peers::kLine;
}

std::size_t padded(std::size_t bytes) {
    return (bytes + Peers::kLine - 1) / Peers::kLine * Peers::kLine;
}

std::size_t index(int rank) {
    return static_cast<std::size_t>(rank);
}

}  // namespace

// One direction between two ranks: how far its writer and its reader are, in bytes since the beginning.
struct Mail::Lane {
    alignas(Peers::kLine) std::atomic<std::uint64_t> written;
    alignas(Peers::kLine) std::atomic<std::uint64_t> read;
};

std::size_t Mail::bytes(int size) {
    return index(size) * index(size) * (sizeof(Lane) + ring_bytes_for(size));
}

Mail::Mail(std::shared_ptr<const Mapping> memory, std::byte* place, Peers& peers)
    : memory_(std::move(memory)),
      place_(place),
      peers_(peers),
      ring_bytes_(ring_bytes_for(peers.size())),
      outgoing_(index(peers.size())),
      incoming_(index(peers.size())) {}

Mail::~Mail() {
    close(std::make_exception_ptr(std::runtime_error("the group has been destroyed")));
}

std::string Mail::text(const Letter& letter) const {
    const std::string whom = letter.peer == kAnyone ? "any rank" : "rank " + std::to_string(peers_.number(letter.peer));
    return (letter.outgoing ? "send(" : "recv(") + std::to_string(letter.bytes) + " bytes " +
           (letter.outgoing ? "to " : "from ") + whom + ", tag " + std::to_string(letter.tag) + ")";
}

Mail::Lane& Mail::lane(int from, int to) const {
    return *reinterpret_cast<Lane*>(ring(from, to) - sizeof(Lane));
}

std::byte* Mail::ring(int from, int to) const {
    return place_ + index(from * peers_.size() + to) * (sizeof(Lane) + ring_bytes_) + sizeof(Lane);
}

Mail::Handle Mail::send(int to, Tag tag, const std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout,
                        Done done) {
    return post({true, to, tag, const_cast<std::byte*>(data), bytes, Clock::now() + timeout, timeout, std::move(done)});
}

Mail::Handle Mail::receive(int from, Tag tag, std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout,
                           Done done) {
    return post({false, from, tag, data, bytes, Clock::now() + timeout, timeout, std::move(done)});
}

Mail::Handle Mail::post(Letter given) {
    auto letter = std::make_shared<Letter>(std::move(given));
    peers_.heed([&] { return text(*letter); });
    std::unique_lock lock(mutex_);
    if (closed_) std::rethrow_exception(closed_);
    start(letter);
    if (!letter->finished && letter->done) {  // who gives no `done` waits for it himself
        if (!carrier_.joinable()) carrier_ = std::thread([this] { carry(); });
        if (parked_ && waiting_ == 0) wake_.notify_all();
    }
    tell(lock);
    return letter;
}

void Mail::start(const Handle& letter) {
    if (letter->outgoing) {
        auto& queue = outgoing_[index(letter->peer)];
        queue.push_back(letter);
        if (queue.size() == 1) push(letter->peer);
        return;
    }
    if (claim(letter)) return;
    expected_.push_back(letter);
    for (int peer = 0; peer < peers_.size(); ++peer) {
        if (letter->peer == peer || letter->peer == kAnyone) pull(peer);
    }
}

// Take what has been put aside, if the letter asks for some of it.
bool Mail::claim(const Handle& letter) {
    const auto found = std::find_if(aside_.begin(), aside_.end(), [&](const ParcelHandle& parcel) {
        return parcel->tag == letter->tag && (letter->peer == kAnyone || letter->peer == parcel->from);
    });
    if (found == aside_.end()) return false;
    const ParcelHandle parcel = *found;
    aside_.erase(found);
    parcel->letter = letter;
    letter->peer = parcel->from;
    if (parcel->moved == parcel->bytes) deliver(parcel);
    return true;
}

// Move all that can be moved; whether anything was.
bool Mail::progress() {
    bool moved = false;
    for (int peer = 0; peer < peers_.size(); ++peer) {
        if (!outgoing_[index(peer)].empty()) moved |= push(peer);
        moved |= pull(peer);
    }
    return moved;
}

bool Mail::push(int to) {
    Lane& lane = this->lane(peers_.rank(), to);
    std::byte* ring = this->ring(peers_.rank(), to);
    std::uint64_t written = lane.written.load(std::memory_order_relaxed);
    const std::uint64_t before = written;
    auto& queue = outgoing_[index(to)];
    while (!queue.empty()) {
        const Handle letter = queue.front();
        const std::size_t free = ring_bytes_ - (written - lane.read.load());
        if (free == 0) break;  // all lengths are padded: what is free is a multiple of a line
        std::byte* at = ring + written % ring_bytes_;
        if (!letter->announced) {
            const Header header{letter->tag, letter->bytes};
            std::memcpy(at, &header, sizeof(header));
            written += sizeof(header);
            letter->announced = true;
        } else {
            const std::size_t room = std::min({free, ring_bytes_ - written % ring_bytes_, kPiece});
            const std::size_t now = std::min(room, letter->bytes - letter->moved);
            std::memcpy(at, letter->data + letter->moved, now);
            letter->moved += now;
            written += padded(now);
        }
        if (letter->moved == letter->bytes) {
            queue.pop_front();
            lane.written.store(written);
            finish(letter, nullptr);
        } else if (letter->moved != 0) {
            lane.written.store(written);
        }
    }
    lane.written.store(written);
    if (written != before) peers_.ring(to);
    return written != before;
}

bool Mail::pull(int from) {
    Lane& lane = this->lane(from, peers_.rank());
    const std::byte* ring = this->ring(from, peers_.rank());
    std::uint64_t read = lane.read.load(std::memory_order_relaxed);
    const std::uint64_t before = read;
    ParcelHandle& parcel = incoming_[index(from)];
    while (const std::size_t here = lane.written.load() - read) {
        const std::byte* at = ring + read % ring_bytes_;
        if (!parcel) {
            if (!is_wanted(from)) break;
            Header header;
            std::memcpy(&header, at, sizeof(header));
            parcel = std::make_shared<Parcel>(Parcel{from, header.tag, header.bytes, 0, nullptr, nullptr});
            meet(parcel);
            read += sizeof(header);
        } else {
            const std::size_t now = std::min({here, ring_bytes_ - read % ring_bytes_, parcel->bytes - parcel->moved});
            const bool direct = parcel->letter && !parcel->aside && parcel->bytes == parcel->letter->bytes;
            if (!direct && !parcel->aside) parcel->aside = std::make_unique<std::byte[]>(parcel->bytes);
            std::memcpy((direct ? parcel->letter->data : parcel->aside.get()) + parcel->moved, at, now);
            parcel->moved += now;
            read += padded(now);
        }
        lane.read.store(read);
        if (parcel->moved < parcel->bytes) continue;
        const ParcelHandle whole = std::move(parcel);
        parcel = nullptr;
        if (whole->letter) deliver(whole);
    }
    if (read != before) peers_.ring(from);
    return read != before;
}

// Whether a receive waits for a message of this rank; if none does, what comes can stay in the lane.
bool Mail::is_wanted(int from) const {
    return std::any_of(expected_.begin(), expected_.end(),
                       [from](const Handle& letter) { return letter->peer == from || letter->peer == kAnyone; });
}

// A message whose header has been read is for the first receive that asks for it, or else put aside.
void Mail::meet(const ParcelHandle& parcel) {
    const auto found = std::find_if(expected_.begin(), expected_.end(), [&](const Handle& letter) {
        return letter->tag == parcel->tag && (letter->peer == kAnyone || letter->peer == parcel->from);
    });
    if (found == expected_.end()) {
        aside_.push_back(parcel);
        return;
    }
    parcel->letter = *found;
    parcel->letter->peer = parcel->from;
    expected_.erase(found);
}

// A message is whole, and asked for.
void Mail::deliver(const ParcelHandle& parcel) {
    const Handle& letter = parcel->letter;
    std::exception_ptr error;
    if (parcel->bytes != letter->bytes) {
        error = std::make_exception_ptr(CommError(
            CommError::Kind::kMismatch, "rank " + std::to_string(peers_.number(peers_.rank())) + ": rank " +
                                            std::to_string(peers_.number(parcel->from)) + " has sent " +
                                            std::to_string(parcel->bytes) + " bytes for " + text(*letter) +
                                            "; what is sent and the tensor that receives it must be of one size"));
    } else if (parcel->aside) {
        std::memcpy(letter->data, parcel->aside.get(), parcel->bytes);
    }
    finish(letter, error);
}

void Mail::finish(const Handle& letter, std::exception_ptr error) {
    letter->error = error;
    if (letter->done) {
        if (auto tell = letter->done(error)) to_tell_.push_back(std::move(tell));
        letter->done = nullptr;
    }
    letter->finished = true;
    if (waiting_ > 1) peers_.ring(peers_.rank());  // another thread may wait for it
}

void Mail::fail_all(std::exception_ptr error) {
    if (!closed_) closed_ = error;
    for (auto& queue : outgoing_) {
        for (const Handle& letter : queue) finish(letter, error);
        queue.clear();
    }
    for (const Handle& letter : std::exchange(expected_, {})) finish(letter, error);
    for (ParcelHandle& parcel : incoming_) {
        if (const ParcelHandle left = std::exchange(parcel, nullptr); left && left->letter) finish(left->letter, error);
    }
    aside_.clear();
}

// Callbacks run without the lock.
void Mail::tell(std::unique_lock<std::mutex>& lock) {
    while (!to_tell_.empty()) {
        const auto now = std::exchange(to_tell_, {});
        lock.unlock();
        for (const auto& each : now) each();
        lock.lock();
    }
}

bool Mail::wait(const Handle& letter, std::chrono::milliseconds limit) {
    const bool for_ever = limit == std::chrono::milliseconds::max();
    const auto until = Clock::now() + (for_ever ? 0ms : limit);
    std::unique_lock lock(mutex_);
    ++waiting_;
    Patience patience(peers_);
    bool in_time = true;
    while (!letter->finished && in_time) {
        if (!closed_ && progress()) {
            patience = Patience(peers_);
            tell(lock);
            continue;
        }
        peers_.note_core();
        const bool shares_core = peers_.shares_core(0, [&](int each) { return needs(*letter, each); });
        lock.unlock();
        if (patience.wait(shares_core, [&] { return moves(letter); })) {
            in_time = for_ever || Clock::now() < until;
            try {
                look_around(letter);
            } catch (...) {
                lock.lock();
                --waiting_;
                throw;
            }
        }
        lock.lock();
    }
    if (--waiting_ == 0 && parked_ && under_way()) wake_.notify_all();
    return in_time;
}

// For one who is about to sleep: whether there is no need to.
bool Mail::moves(const Handle& letter) {
    std::unique_lock lock(mutex_);
    const bool moved = !closed_ && progress();
    tell(lock);
    return moved || letter->finished || closed_ || ending_;
}

bool Mail::is_finished(const Handle& letter) {
    const std::lock_guard lock(mutex_);
    return letter->finished;
}

bool Mail::is_empty(int from) const {
    const Lane& lane = this->lane(from, peers_.rank());
    return lane.written.load() == lane.read.load();
}

// Whether a letter is lost if this peer is gone: it is not done, and nothing that may be for it is left on a lane.
bool Mail::needs(const Letter& letter, int peer) const {
    if (letter.finished || peer == peers_.rank()) return false;
    if (letter.outgoing) return peer == letter.peer;
    if (letter.peer != kAnyone) return peer == letter.peer && is_empty(peer);
    bool all_left = true, all_empty = true;
    for (int each = 0; each < peers_.size(); ++each) {
        all_left &= each == peers_.rank() || peers_.has_left(each);
        all_empty &= is_empty(each);  // asked after: what one has sent before he left is there by now
    }
    return all_empty && (all_left || !peers_.has_left(peer));
}

// For a wait that has moved nothing for a while. An error ends all that is under way.
void Mail::look_around(const Handle& letter) {
    try {
        peers_.look_around(
            [&](int peer) {
                const std::lock_guard lock(mutex_);
                return needs(*letter, peer);
            },
            [&] { return text(*letter); });
        const std::unique_lock lock(mutex_);
        if (!letter->finished && Clock::now() > letter->deadline)
            peers_.give_up_waiting(std::to_string(letter->timeout.count()) + " ms in " + text(*letter));
    } catch (const CommError&) {
        const auto error = std::current_exception();
        std::unique_lock lock(mutex_);
        fail_all(error);
        tell(lock);
    } catch (...) {  // Ctrl-C: whoever made us wait is to have it
        std::unique_lock lock(mutex_);
        fail_all(std::make_exception_ptr(CommError(
            CommError::Kind::kInterrupted,
            "rank " + std::to_string(peers_.number(peers_.rank())) + " was interrupted in " + text(*letter))));
        tell(lock);
        lock.unlock();
        throw;
    }
}

// A letter under way that nobody waits for, the one that was due first.
Mail::Handle Mail::under_way() const {
    Handle first;
    const auto consider = [&first](const Handle& letter) {
        if (letter && !letter->finished && (!first || letter->deadline < first->deadline)) first = letter;
    };
    for (const auto& queue : outgoing_) std::for_each(queue.begin(), queue.end(), consider);
    std::for_each(expected_.begin(), expected_.end(), consider);
    for (const ParcelHandle& parcel : incoming_) {
        if (parcel) consider(parcel->letter);
    }
    return first;
}

void Mail::carry() {
    std::unique_lock lock(mutex_);
    Patience patience(peers_);
    in_background = true;
    while (!ending_) {
        const Handle letter = under_way();
        if (!letter || waiting_ > 0 || closed_) {
            parked_ = true;
            wake_.wait(lock);
            parked_ = false;
            patience = Patience(peers_);
            wake_.wait_for(lock, kGrace);
        } else if (progress()) {
            patience = Patience(peers_);
            tell(lock);
        } else {
            lock.unlock();
            if (patience.wait(true, [&] { return moves(letter); })) look_around(letter);
            lock.lock();
        }
    }
}

void Mail::close(std::exception_ptr reason) {
    {
        std::unique_lock lock(mutex_);
        ending_ = true;
        fail_all(reason);
        tell(lock);
        wake_.notify_all();
        peers_.ring(peers_.rank());
    }
    if (!carrier_.joinable()) return;
    if (carrier_.get_id() == std::this_thread::get_id())
        carrier_.detach();  // told of its end, someone destroys the group
    else
        carrier_.join();
}

}  // namespace dist_prims
