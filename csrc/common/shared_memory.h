// Shared memory without a name: it needs no /dev/shm, no other process can open it by guessing, and the kernel frees it
// with its last user.
#pragma once

#include <cerrno>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace dist_prims {

// Bytes of a cache line. Data that different ranks write lies on different lines.
inline constexpr std::size_t kCacheLine = 64;

inline std::size_t round_up_to_line(std::size_t bytes) {
    return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// An open file descriptor; the destructor closes it. -1: none.
class Descriptor {
public:
    explicit Descriptor(int number = -1) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor();

    int get() const { return number_; }
    int release() { return std::exchange(number_, -1); }

private:
    int number_;
};

// Throws std::system_error for errno; where no descriptor is left, the message says so and names the remedy.
[[noreturn]] void throw_errno(const std::string& what);

// The result of a system call that returns -1 on failure; repeats the call while a signal interrupts it.
template <typename Call>
auto uninterrupted(const Call& call) {
    for (;;) {
        const auto result = call();
        if (result >= 0 || errno != EINTR) return result;
    }
}

// The identity of a file: an inode number is unique only within its device.
struct FileId {
    std::uint64_t device = 0, inode = 0;

    auto operator<=>(const FileId&) const = default;
};

FileId id_of(const Descriptor& file);  // zeros for no file

// Makes `bytes` of memory without pages. The name appears in the list of mappings of a process.
Descriptor make_sparse_memory(const char* name, std::size_t bytes);
// Throws std::system_error if the machine or the control group of this process has fewer bytes left.
void check_available(std::size_t bytes);
// reserve() allocates pages of sparse memory, on the NUMA node of the calling thread; new pages read as zero. A
// shortage is an error here, not a SIGBUS at the first access. discard() frees pages, even while other processes map
// them; `begin` and `bytes` must be multiples of a page.
void reserve(const Descriptor& memory, std::size_t begin, std::size_t bytes);
void discard(const Descriptor& memory, std::size_t begin, std::size_t bytes) noexcept;

// A mapping of all bytes of a memory file, without the pages in a forked child.
class Mapping {
public:
    explicit Mapping(const Descriptor& memory);
    Mapping(const Mapping&) = delete;
    ~Mapping();

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }

    // Excludes the mapping from core dumps. Needed for sparse memory: a core dump reads all of a mapping, which
    // allocates the missing pages.
    void leave_out_of_core_dumps() const;

private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    int owner_ = 0;  // the process
};

}  // namespace dist_prims
