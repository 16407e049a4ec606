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

constexpr std::size_t kPage = 4096;  // the data begins on a page of its own
static_assert(sizeof(LentHead) == kPage);

std::atomic<std::uint64_t>& released(const Mapping& mapping) {
    return head_of(mapping.data() + kPage).released;
}

std::uint64_t inode_of(const Descriptor& descriptor) {
    struct stat facts{};
    return ::fstat(descriptor.get(), &facts) == 0 ? facts.st_ino : 0;
}

}  // namespace

LentHead& head_of(std::byte* data) {
    return *reinterpret_cast<LentHead*>(data - kPage);
}

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

std::shared_ptr<const Mapping> Borrower::memory(int process, const Loan& loan) {
    auto found = borrowed_.find(loan.inode);
    if (found == borrowed_.end() || released(*found->second.mapping)) {
        std::erase_if(borrowed_, [](const auto& each) { return released(*each.second.mapping) != 0; });
        const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(loan.descriptor);
        const Descriptor opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
        if (opened.get() < 0 || inode_of(opened) != loan.inode) return nullptr;
        try {
            found = borrowed_.emplace(loan.inode, Borrowed{std::make_shared<const Mapping>(opened)}).first;
        } catch (const std::system_error&) {
            return nullptr;
        }
    }
    return found->second.mapping;
}

bool Borrower::is_agreed(const Loan& loan) const {
    const auto found = borrowed_.find(loan.inode);
    return found != borrowed_.end() && found->second.is_agreed;
}

void Borrower::agree(const Loan& loan) {
    borrowed_.at(loan.inode).is_agreed = true;
}

}  // namespace dist_prims
