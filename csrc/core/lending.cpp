#include "lending.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <system_error>
#include <utility>

namespace dist_prims {
namespace {

constexpr std::size_t kPage = 4096;  // in front of the data: whether the memory is still in use

std::atomic<std::uint64_t>& released(const Mapping& mapping) {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(mapping.data());
}

std::uint64_t inode_of(const Descriptor& descriptor) {
    struct stat facts{};
    return ::fstat(descriptor.get(), &facts) == 0 ? facts.st_ino : 0;
}

}  // namespace

Lender& Lender::instance() {
    static Lender* const one = new Lender;  // tensors may outlive every static object
    return *one;
}

std::byte* Lender::allocate(std::size_t bytes) {
    Descriptor descriptor = make_memory(kPage + bytes);
    Mapping mapping(descriptor);
    const std::uint64_t inode = inode_of(descriptor);
    std::byte* data = mapping.data() + kPage;
    const std::lock_guard lock(mutex_);
    lent_.emplace(data, Memory{std::move(descriptor), std::move(mapping), inode});
    return data;
}

void Lender::release(std::byte* data) {
    if (owner_ != this_process()) return;  // in a forked child it is not mapped
    const std::lock_guard lock(mutex_);
    const auto found = lent_.find(data);
    if (found == lent_.end()) return;
    released(found->second.mapping).store(1, std::memory_order_release);
    lent_.erase(found);
}

Loan Lender::loan(const std::byte* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto after = lent_.upper_bound(data);
    if (after == lent_.begin()) return {};
    const Memory& memory = std::prev(after)->second;
    const std::size_t offset = static_cast<std::size_t>(data - memory.mapping.data());
    if (offset + bytes > memory.mapping.size()) return {};
    return {memory.inode, offset, memory.descriptor.get(), 0};
}

std::byte* Borrower::at(int process, const Loan& loan) {
    auto found = borrowed_.find(loan.inode);
    if (found == borrowed_.end() || released(found->second)) {
        std::erase_if(borrowed_, [](const auto& each) { return released(each.second) != 0; });
        const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(loan.descriptor);
        const Descriptor opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
        if (opened.get() < 0 || inode_of(opened) != loan.inode) return nullptr;
        try {
            found = borrowed_.emplace(loan.inode, Mapping(opened)).first;
        } catch (const std::system_error&) {
            return nullptr;
        }
    }
    return found->second.data() + loan.offset;
}

}  // namespace dist_prims
