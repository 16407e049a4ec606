// A large sparse memory file, mapped once by its owner and once by each peer. Tensors are ranges of whole pages in it,
// so a process needs few descriptors for all of its shared tensors.
//
// A range has pages only between reserve() and discard(). discard() frees them although peers have the file mapped. A
// first design had a file for each tensor, whose pages stayed allocated until the last peer had unmapped it.
#pragma once

#include <cstddef>
#include <memory>

#include "../common/free_ranges.h"
#include "../common/shared_memory.h"

namespace dist_prims {

class Arena {
public:
    // The bytes of a page: 4 KB on x86-64; 4, 16 or 64 KB on arm64, by the kernel.
    static std::size_t page();

    // An arena of `wanted` bytes. If the machine or a limit of this process forbids that, tries half as many bytes and
    // so on, down to `least`; throws std::system_error if these are too many.
    static std::unique_ptr<Arena> make(std::size_t least, std::size_t wanted);
    explicit Arena(Descriptor file);

    int descriptor() const { return file_.get(); }
    const FileId& id() const { return id_; }
    std::size_t size() const { return mapping_.size(); }
    std::size_t offset_of(const std::byte* data) const { return static_cast<std::size_t>(data - mapping_.data()); }

    // A range of addresses without pages; null if there is no space. take() and give_back() are not thread-safe.
    std::byte* take(std::size_t bytes);
    void give_back(const std::byte* data, std::size_t bytes) { free_.give_back(offset_of(data), bytes); }

    void reserve(const std::byte* data, std::size_t bytes) const { dist_prims::reserve(file_, offset_of(data), bytes); }
    void discard(const std::byte* data, std::size_t bytes) const noexcept {
        dist_prims::discard(file_, offset_of(data), bytes);
    }
    // Replaces the pages at these addresses by private copies, which other processes neither see nor write. Stores of
    // other threads of this process are not lost. The pages of the file between data + begin and data + end are freed
    // as they are copied, so that the memory is not needed twice.
    void make_private(std::byte* data, std::size_t bytes, std::size_t begin, std::size_t end) const;

private:
    const Descriptor file_;
    const Mapping mapping_;
    const FileId id_;
    FreeRanges free_;
};

}  // namespace dist_prims
