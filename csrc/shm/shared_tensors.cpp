#include "shared_tensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <string>
#include <system_error>

namespace dist_prims {
namespace {

constexpr std::size_t kLeastShared = 4096;     // bytes; a collective works in place on no fewer
constexpr std::size_t kFirstArena = 64 << 20;  // bytes; a later arena is as large as all before it together
constexpr std::align_val_t kAlignment{64};     // of ordinary memory, as torch aligns it

}  // namespace

Exporter& Exporter::instance() {
    static std::atomic<Exporter*> current{nullptr};  // never destroyed: tensors may outlive every static object
    Exporter* exporter = current.load(std::memory_order_acquire);
    if (exporter && exporter->is_of_this_process()) return *exporter;
    auto fresh = std::make_unique<Exporter>();
    return current.compare_exchange_strong(exporter, fresh.get()) ? *fresh.release() : *exporter;
}

std::byte* Exporter::allocate(std::size_t bytes) {
    const Block block = new_block(bytes);
    if (block.arena) {
        try {
            block.arena->reserve(block.data, block.bytes);
        } catch (...) {
            release(block.data);
            throw;
        }
    }
    return block.data;
}

// Adds a block: ordinary memory if it is shorter than kLeastShared, otherwise whole pages of an arena, of a new one if
// no arena has space.
Exporter::Block Exporter::new_block(std::size_t bytes) {
    const std::size_t page = Arena::page();
    if (bytes > PTRDIFF_MAX - page) throw std::bad_alloc();
    const std::lock_guard lock(mutex_);
    Block block{nullptr, bytes, nullptr};
    if (bytes < kLeastShared) {
        block.data = static_cast<std::byte*>(::operator new(bytes, kAlignment));
    } else {
        block.bytes = (bytes + page - 1) / page * page;
        std::size_t all = 0;
        for (const auto& arena : arenas_) {
            if (!block.data && (block.data = arena->take(block.bytes))) block.arena = arena.get();
            all += arena->size();
        }
        if (!block.data) {
            block.arena = arenas_.emplace_back(Arena::make(block.bytes, std::max(kFirstArena, all))).get();
            block.data = block.arena->take(block.bytes);
        }
    }
    blocks_.emplace(block.data, block);
    return block;
}

void Exporter::release(std::byte* data) noexcept {
    if (!is_of_this_process()) return;  // a forked child has neither the memory nor the arenas
    std::unique_lock lock(mutex_);
    const auto entry = blocks_.find(data);
    if (entry == blocks_.end()) return;
    const Block block = entry->second;
    blocks_.erase(entry);
    lock.unlock();
    if (!block.arena) return ::operator delete(block.data, kAlignment);
    block.arena->discard(block.data, block.bytes);
    if (block.is_withdrawn) {
        ::munmap(block.data, block.bytes);
        return;
    }
    lock.lock();
    try {
        block.arena->give_back(block.data, block.bytes);
    } catch (const std::bad_alloc&) {  // the addresses are not used again; their pages are free
    }
}

// The block that contains an address; null if there is none. The caller holds `mutex_`.
Exporter::Block* Exporter::block_at(const std::byte* data) {
    const auto after = blocks_.upper_bound(data);
    if (after == blocks_.begin()) return nullptr;
    Block& block = std::prev(after)->second;
    return data < block.data + block.bytes ? &block : nullptr;
}

SharedTensorRef Exporter::ref_of(const std::byte* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const Block* block = block_at(data);
    if (!block || !block->arena || block->is_withdrawn || data + bytes > block->data + block->bytes) return {};
    return {block->arena->id(), block->arena->offset_of(data), block->arena->descriptor()};
}

void Exporter::withdraw(const std::byte* data, std::size_t bytes) {
    if (!is_of_this_process()) return;
    // 1. Mark the block, so that no call gets a reference to it any more.
    const std::lock_guard one_at_a_time(withdrawing_);
    std::unique_lock lock(mutex_);
    Block* const entry = block_at(data);
    if (!entry || !entry->arena || entry->is_withdrawn) return;
    entry->is_withdrawn = true;
    const Block block = *entry;
    lock.unlock();
    // 2. Copy its pages, without `mutex_`: this takes long, and other tensors can be allocated meanwhile.
    const auto begin = static_cast<std::size_t>(data - block.data);
    block.arena->make_private(block.data, block.bytes, begin, begin + bytes);
}

std::shared_ptr<const Mapping> Importer::map(int process, const SharedTensorRef& tensor_ref) {
    auto& mapping = mapped_[tensor_ref.file];
    if (mapping) return mapping;
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(tensor_ref.descriptor);
    const Descriptor opened(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
    if (opened.get() < 0 || id_of(opened) != tensor_ref.file) return nullptr;
    try {
        mapping = std::make_shared<const Mapping>(opened);
        mapping->leave_out_of_core_dumps();
    } catch (const std::system_error&) {
        return nullptr;
    }
    return mapping;
}

}  // namespace dist_prims
