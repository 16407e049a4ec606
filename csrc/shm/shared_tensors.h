// Shared tensors: tensor memory that the other ranks of a host can map, so that a collective works on it in place.
//
// A process allocates shared tensors in a few arenas (arena.h). A call names the arena and the offset of its data
// (SharedTensorRef). A peer that meets an arena for the first time opens it through /proc and maps it. Allocation is
// not collective: each rank allocates at any time.
//
// When a call on shared tensors fails, a peer that was late or stopped may continue the call and write its results much
// later. The memory is therefore withdrawn before the error is raised: its pages become private to this process, at the
// same addresses, and the peer writes to pages of the arena that are never reused.
//
// Memory order: in_place.h and stamps.h order the accesses of several ranks to the data.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "../common/process.h"
#include "../common/types.h"
#include "arena.h"

namespace dist_prims {

// Allocates the shared tensors of this process. Any thread may call it.
class Exporter {
public:
    // The exporter of this process. A forked child has none of its parent's memory and gets an exporter of its own.
    static Exporter& instance();
    bool is_of_this_process() const { return owner_ == this_process(); }

    // A request of less than 4 KB gets ordinary memory: no collective works in place on so little.
    std::byte* allocate(std::size_t bytes);
    void release(std::byte* data) noexcept;

    // The reference of these bytes; empty if they lie in ordinary memory or were withdrawn.
    SharedTensorRef ref_of(const std::byte* data, std::size_t bytes);

    // Withdraws the memory of the whole tensor that contains these bytes from all other processes. A call has failed on
    // the bytes. Does nothing if they are not shared.
    void withdraw(const std::byte* data, std::size_t bytes);

private:
    // The memory of one tensor, from allocate() to release(). A block in an arena is in one of three states:
    // - new: it has its addresses, but no pages yet; allocate() reserves them before it returns the block;
    // - shared: it has pages; ref_of() returns references, with which peers map the pages;
    // - withdrawn: its pages are private copies; ref_of() returns none. A late peer may still write to the range of
    //   the arena, so release() does not give the range back to the arena.
    struct Block {
        std::byte* data;
        std::size_t bytes;
        Arena* arena;  // null: ordinary memory
        bool is_withdrawn = false;
    };

    Block* block_at(const std::byte* data);
    Block new_block(std::size_t bytes);

    const int owner_ = this_process();
    std::mutex mutex_;
    std::vector<std::unique_ptr<Arena>> arenas_;  // for the life of the process: peers may have them mapped
    std::map<const std::byte*, Block> blocks_;    // by their first address
    std::mutex withdrawing_;                      // held during a withdrawal: a second one waits for the first
};

// Maps the shared tensors of other processes. Only the thread that runs a collective of the group calls it.
class Importer {
public:
    // The mapped arena of a tensor of `process`; null if the arena cannot be opened or mapped.
    std::shared_ptr<const Mapping> map(int process, const SharedTensorRef& tensor_ref);

    // Whether the ranks have agreed that all of them have mapped the arena. They agree in a phase, so the answer is the
    // same on all of them.
    bool is_agreed(const SharedTensorRef& tensor_ref) const { return agreed_.contains(tensor_ref.file); }
    void agree(const SharedTensorRef& tensor_ref) { agreed_.insert(tensor_ref.file); }

private:
    std::map<FileId, std::shared_ptr<const Mapping>> mapped_;
    std::set<FileId> agreed_;
};

}  // namespace dist_prims
