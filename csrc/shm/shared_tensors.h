// Shared tensors: tensor memory that the other ranks of a host can map, so that a collective works on it in place.
//
// A process allocates shared tensors in a few arenas (arena.h). A call names the arena and the offset of its data
// (SharedTensorRef). A peer that meets an arena for the first time opens it through /proc and maps it. Allocation is
// not collective: each rank allocates at any time.
//
// When a call on shared tensors fails, a peer that was late or stopped may continue the call and write its results much
// later. The memory is therefore withdrawn before the error is raised: its pages become private to this process, at the
// same addresses, and the peer writes to pages of the arena that are never reused.
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

// Allocates the shared tensors of this process.
class Exporter {
public:
    // The exporter of this process. A forked child has none of its parent's memory and gets an exporter of its own.
    static Exporter& instance();
    bool is_of_this_process() const { return owner_ == this_process(); }

    // A request of less than a page gets ordinary memory: no collective works in place on so little.
    std::byte* allocate(std::size_t bytes);
    void release(std::byte* data) noexcept;

    // The reference of these bytes; empty if they lie in ordinary memory or were withdrawn.
    SharedTensorRef ref_of(const std::byte* data, std::size_t bytes);

    // Withdraws the memory of a tensor from all other processes. The given bytes are the part of the tensor on which a
    // call failed. Does nothing if they are not shared.
    void withdraw(const std::byte* data, std::size_t bytes);

private:
    struct Block {
        std::byte* data;
        std::size_t bytes;
        Arena* arena;  // null: ordinary memory
        bool is_withdrawn = false;
    };

    Block* find(const std::byte* data);
    Block take(std::size_t bytes);

    const int owner_ = this_process();
    std::mutex mutex_;
    std::vector<std::unique_ptr<Arena>> arenas_;  // for the life of the process: peers may have them mapped
    std::map<const std::byte*, Block> blocks_;    // by where their data begins
    std::mutex withdrawing_;                      // a second withdrawal returns when the first is complete
};

// Maps the shared tensors of other processes.
class Importer {
public:
    // The mapped arena of a tensor of `process`; null if the arena cannot be opened or mapped.
    std::shared_ptr<const Mapping> map(int process, const SharedTensorRef& tensor_ref);

    // Whether all ranks are known to have mapped the arena. All ranks learn that in the same phase, so the answer is
    // the same on all of them.
    bool is_agreed(const SharedTensorRef& tensor_ref) const { return agreed_.contains(tensor_ref.file); }
    void agree(const SharedTensorRef& tensor_ref) { agreed_.insert(tensor_ref.file); }

private:
    std::map<FileId, std::shared_ptr<const Mapping>> mapped_;
    std::set<FileId> agreed_;
};

}  // namespace dist_prims
