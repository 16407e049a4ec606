#include "memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace dist_prims {
namespace {

[[noreturn]] void fail(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
}

Descriptor::~Descriptor() {
    if (number_ >= 0) ::close(number_);
}

int Descriptor::release() {
    return std::exchange(number_, -1);
}

int this_process() {
    static std::atomic<int> number{::getpid()};
    static const int listening = ::pthread_atfork(nullptr, nullptr, [] { number = ::getpid(); });
    static_cast<void>(listening);
    return number.load(std::memory_order_relaxed);
}

Descriptor make_memory(std::size_t bytes) {
    Descriptor memory(::memfd_create("dist_prims", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (memory.get() < 0) fail("memfd_create");
    if (::fallocate(memory.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
        fail("cannot reserve " + std::to_string(bytes) + " bytes of shared memory; is the memory limit reached?");
    }
    if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        fail("sealing shared memory");
    return memory;
}

Mapping::Mapping(const Descriptor& memory) {
    struct stat facts{};
    if (::fstat(memory.get(), &facts) != 0) fail("fstat of shared memory");
    size_ = static_cast<std::size_t>(facts.st_size);
    void* data = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    if (data == MAP_FAILED) fail("mapping shared memory");
    data_ = static_cast<std::byte*>(data);
    owner_ = this_process();
    ::madvise(data_, size_, MADV_DONTFORK);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), owner_(other.owner_) {}

Mapping::~Mapping() {
    if (data_ && owner_ == this_process())
        ::munmap(data_, size_);  // a forked child has it not, and may have other things there
}

}  // namespace dist_prims
