#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <system_error>

#include "available_memory.h"
#include "process.h"

namespace dist_prims {
namespace {

constexpr std::size_t kLargestPiece = std::size_t{64} << 20, kSmallestPiece = std::size_t{64} << 10;  // of a fallocate

}  // namespace

void throw_errno(const std::string& what) {
    const int error = errno;
    std::string remedy;
    if (error == EMFILE) {
        rlimit limit{};
        ::getrlimit(RLIMIT_NOFILE, &limit);
        remedy = ": this process has no descriptors left (its limit is " + std::to_string(limit.rlim_cur) +
                 "); raise it with `ulimit -n`, or keep fewer files, groups and shared tensors";
    } else if (error == ENFILE) {
        remedy = ": this machine has no descriptors left; raise fs.file-max, or `ulimit -n` will not help";
    }
    throw std::system_error(error, std::generic_category(), what + remedy);
}

Descriptor::~Descriptor() {
    if (number_ >= 0) ::close(number_);
}

FileId id_of(const Descriptor& file) {
    struct stat facts{};
    return ::fstat(file.get(), &facts) == 0 ? FileId{facts.st_dev, facts.st_ino} : FileId{};
}

Descriptor make_sparse_memory(const char* name, std::size_t bytes) {
    Descriptor memory(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (memory.get() < 0) throw_errno("memfd_create");
    if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0)
        throw_errno("cannot reserve " + std::to_string(bytes) +
                    " bytes of shared memory; is the limit of file sizes (`ulimit -f`) reached?");
    if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        throw_errno("sealing shared memory");
    return memory;
}

void check_available(std::size_t bytes) {
    constexpr std::size_t kLarge = 64 << 20;  // a reservation of so many bytes takes far longer than available_memory()
    const std::size_t available = bytes < kLarge ? bytes : available_memory();
    if (bytes > available) {
        errno = ENOMEM;
        throw_errno("cannot reserve " + std::to_string(bytes) +
                    " bytes of shared memory: the machine or the control group of this process has " +
                    std::to_string(available) + " left");
    }
}

// A signal makes older kernels undo a whole fallocate(). So the memory is reserved piece by piece, and in smaller
// pieces after each interruption: the loop ends whatever the rate of signals.
void reserve(const Descriptor& memory, std::size_t begin, std::size_t bytes) {
    check_available(bytes);
    std::size_t piece = kLargestPiece;
    for (std::size_t done = 0; done < bytes;) {
        const std::size_t next = std::min(piece, bytes - done);
        if (::fallocate(memory.get(), 0, static_cast<off_t>(begin + done), static_cast<off_t>(next)) == 0) {
            done += next;
        } else if (errno == EINTR) {
            piece = std::max(piece / 2, kSmallestPiece);
        } else {
            throw_errno("cannot reserve " + std::to_string(bytes) +
                        " bytes of shared memory; is the memory limit reached?");
        }
    }
}

void discard(const Descriptor& memory, std::size_t begin, std::size_t bytes) noexcept {
    constexpr int kMode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    while (::fallocate(memory.get(), kMode, static_cast<off_t>(begin), static_cast<off_t>(bytes)) != 0 &&
           errno == EINTR) {
    }
}

Mapping::Mapping(const Descriptor& memory) {
    struct stat facts{};
    if (::fstat(memory.get(), &facts) != 0) throw_errno("fstat of shared memory");
    size_ = static_cast<std::size_t>(facts.st_size);
    void* data = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    if (data == MAP_FAILED) throw_errno("mapping shared memory");
    data_ = static_cast<std::byte*>(data);
    owner_ = this_process();
    ::madvise(data_, size_, MADV_DONTFORK);
}

void Mapping::leave_out_of_core_dumps() const {
    ::madvise(data_, size_, MADV_DONTDUMP);
}

Mapping::~Mapping() {
    if (owner_ == this_process()) ::munmap(data_, size_);  // a forked child may have other memory at these addresses
}

}  // namespace dist_prims
