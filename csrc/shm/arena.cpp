#include "arena.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

namespace dist_prims {
namespace {

constexpr std::size_t kPiece = 16 << 20;  // copied and discarded at a time
constexpr std::size_t kLeastPage = 4096;  // of any machine; an emulated page consists of pages of this size

// The most bytes of a file for this process, in whole pages. A longer file would raise SIGXFSZ.
std::size_t size_limit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
    return static_cast<std::size_t>(limit.rlim_cur) / Arena::page() * Arena::page();
}

// Makes the kernel copy a page of a private mapping. An atomic `or` with 0 would not do: compilers turn it into a load.
void copy_page(std::byte* page) {
    const std::atomic_ref<std::byte> first(*page);
    std::byte value = first.load(std::memory_order_relaxed);
    while (!first.compare_exchange_weak(value, value)) {
    }
}

}  // namespace

std::size_t Arena::page() {
    static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
}

std::unique_ptr<Arena> Arena::make(std::size_t least, std::size_t wanted) {
    const std::size_t limit = size_limit();
    if (least > limit) {
        throw std::system_error(EFBIG, std::generic_category(),
                                "cannot reserve " + std::to_string(least) +
                                    " bytes of shared memory: the limit on the size of a file (ulimit -f) is " +
                                    std::to_string(limit) + " bytes");
    }
    for (std::size_t size = std::min(std::max(least, wanted), limit);;
         size = std::max(least, size / 2 / page() * page())) {
        try {
            return std::make_unique<Arena>(make_sparse_memory("dist_prims:tensors", size));
        } catch (const std::system_error&) {
            if (size == least) throw;
        }
    }
}

Arena::Arena(Descriptor file) : file_(std::move(file)), mapping_(file_), id_(id_of(file_)), free_(mapping_.size()) {
    mapping_.leave_out_of_core_dumps();
}

std::byte* Arena::take(std::size_t bytes) {
    const auto begin = free_.take(bytes);
    return begin ? mapping_.data() + *begin : nullptr;
}

void Arena::make_private(std::byte* data, std::size_t bytes, std::size_t begin, std::size_t end) const {
    // A private mapping of the same pages takes their place in one step. The kernel copies a page when this process
    // first stores to it: copy_page() makes it do so now, before another process can change the page.
    const auto offset = static_cast<off_t>(offset_of(data));
    constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (::mmap(data, bytes, PROT_READ | PROT_WRITE, kFlags, file_.get(), offset) == MAP_FAILED) {
        throw std::system_error(
            errno, std::generic_category(),
            "the memory of a shared tensor cannot be taken back; other ranks may still write to it");
    }
    ::madvise(data, bytes, MADV_DONTFORK);
    begin = (begin + page() - 1) / page() * page();
    end = end / page() * page();
    for (std::size_t at = 0; at < bytes; at += kPiece) {
        const std::size_t next = std::min(at + kPiece, bytes);
        for (std::size_t page = at; page < next; page += kLeastPage) copy_page(data + page);
        const std::size_t first_freed = std::max(at, begin), end_freed = std::min(next, end);
        if (first_freed < end_freed) discard(data + first_freed, end_freed - first_freed);
    }
}

}  // namespace dist_prims
