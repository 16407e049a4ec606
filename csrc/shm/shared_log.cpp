#include "shared_log.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

namespace dist_prims {
namespace {

// Enough for a repair in several rounds, and for 32 calls of grow() that fail, each with up to three texts of a rank.
std::size_t entry_count(int size) {
    return 64 + 128 * static_cast<std::size_t>(size);
}

std::size_t area_bytes(int size) {
    return (16 << 10) + 64 * static_cast<std::size_t>(size);
}

}  // namespace

struct SharedLog::Entry {
    std::atomic<std::uint32_t> place;  // the offset of a Head from the first area, plus 1; 0: no text
};

// In front of each text.
struct SharedLog::Head {
    std::uint32_t rank, length;  // the rank that wrote the text, and its bytes
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "ranks share atomics between processes");

std::size_t SharedLog::bytes(int size) {
    return entry_count(size) * sizeof(Entry) + static_cast<std::size_t>(size) * area_bytes(size);
}

SharedLog::SharedLog(std::shared_ptr<const Mapping> memory, std::byte* place, int rank, int size)
    : memory_(std::move(memory)), place_(place), rank_(rank), size_(size) {}

SharedLog::Entry* SharedLog::entries() const {
    return reinterpret_cast<Entry*>(place_);
}

void SharedLog::append(const std::string& text) {
    const std::lock_guard lock(guard_);
    const std::uint32_t offset = write(text);
    for (std::size_t index = 0; index < entry_count(size_); ++index) {
        std::uint32_t none = 0;
        if (entries()[index].place.compare_exchange_strong(none, offset + 1, std::memory_order_acq_rel)) return;
    }
    throw std::length_error("rank " + std::to_string(rank_) +
                            ": the log of this group is full; end the processes and "
                            "start the group again");
}

// Writes a text into this rank's area; returns its offset from the first area.
std::uint32_t SharedLog::write(const std::string& text) {
    const std::size_t needed = (sizeof(Head) + text.size() + alignof(Head) - 1) / alignof(Head) * alignof(Head);
    if (used_ + needed > area_bytes(size_))
        throw std::length_error("rank " + std::to_string(rank_) + ": a text of " + std::to_string(text.size()) +
                                " bytes does not fit into the log of this group any more; end the processes and start "
                                "the group again");
    const std::size_t offset = static_cast<std::size_t>(rank_) * area_bytes(size_) + used_;
    std::byte* const at = place_ + entry_count(size_) * sizeof(Entry) + offset;
    const Head head{static_cast<std::uint32_t>(rank_), static_cast<std::uint32_t>(text.size())};
    std::memcpy(at, &head, sizeof(head));
    std::memcpy(at + sizeof(head), text.data(), text.size());
    used_ += needed;
    return static_cast<std::uint32_t>(offset);
}

std::vector<std::pair<int, std::string>> SharedLog::read() const {
    std::vector<std::pair<int, std::string>> texts;
    const std::byte* const areas = place_ + entry_count(size_) * sizeof(Entry);
    for (std::size_t index = 0; index < entry_count(size_); ++index) {
        const std::uint32_t place = entries()[index].place.load(std::memory_order_acquire);
        if (place == 0) break;
        Head head;
        std::memcpy(&head, areas + place - 1, sizeof(head));
        texts.emplace_back(static_cast<int>(head.rank),
                           std::string(reinterpret_cast<const char*>(areas + place - 1 + sizeof(head)), head.length));
    }
    return texts;
}

}  // namespace dist_prims
