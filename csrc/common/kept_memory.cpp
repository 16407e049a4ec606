#include "kept_memory.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

#include <algorithm>
#include <list>
#include <mutex>
#include <utility>

namespace dist_prims {

// No call but kept() waits for the lock, which a forked child may have inherited locked: a call that does not get the
// lock uses malloc.
class KeptMemory::Pool {
public:
    // Memory of at least `bytes`, which is set to its length; null if there is none.
    std::unique_ptr<std::byte[]> find(std::size_t& bytes) {
        const std::unique_lock lock(guard_, std::try_to_lock);
        if (!lock) return nullptr;
        // The newest that fits is most likely in the cache. Memory of more than twice the size is left for others.
        const auto fits = [&](const Entry& entry) { return entry.bytes >= bytes && entry.bytes / 2 <= bytes; };
        const auto newest = std::find_if(entries_.begin(), entries_.end(), fits);
        if (newest == entries_.end()) return nullptr;
        Entry entry = std::move(*newest);
        entries_.erase(newest);
        kept_ -= entry.bytes;
        ASAN_UNPOISON_MEMORY_REGION(entry.data.get(), entry.bytes);
        bytes = entry.bytes;
        return std::move(entry.data);
    }

    void keep(std::unique_ptr<std::byte[]> data, std::size_t bytes) {
        const std::unique_lock lock(guard_, std::try_to_lock);
        if (!lock) return;
        ASAN_POISON_MEMORY_REGION(data.get(), bytes);  // so that a late access is found
        kept_ += bytes;
        entries_.push_front({std::move(data), bytes});
        while (kept_ > kMost) {
            Entry& oldest = entries_.back();
            kept_ -= oldest.bytes;
            ASAN_UNPOISON_MEMORY_REGION(oldest.data.get(), oldest.bytes);
            entries_.pop_back();
        }
    }

    std::size_t kept() {
        const std::lock_guard lock(guard_);
        return kept_;
    }

private:
    struct Entry {
        std::unique_ptr<std::byte[]> data;
        std::size_t bytes;
    };

    std::mutex guard_;
    std::list<Entry> entries_;  // the newest first
    std::size_t kept_ = 0;
};

KeptMemory::Pool& KeptMemory::pool() {
    static Pool& pool = *new Pool;  // threads may use it until the process has ended
    return pool;
}

// Makes the pool when the library is loaded: if a process forked during the first call of another thread, the child
// would wait without end for the pool to be made.
[[maybe_unused]] const std::size_t kept_at_load = KeptMemory::kept();

KeptMemory KeptMemory::take(std::size_t bytes) {
    std::unique_ptr<std::byte[]> data = bytes < kLeast ? nullptr : pool().find(bytes);
    if (!data) data = std::make_unique_for_overwrite<std::byte[]>(bytes);
    return {std::move(data), bytes};
}

KeptMemory::~KeptMemory() {
    if (data_ && bytes_ >= kLeast && bytes_ <= kMost) pool().keep(std::move(data_), bytes_);
}

std::size_t KeptMemory::kept() {
    return pool().kept();
}

}  // namespace dist_prims
