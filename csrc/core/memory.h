// Shared memory without a name: it needs no /dev/shm, nobody can guess it, and the kernel frees it with its last user.
#pragma once

#include <cstddef>

namespace dist_prims {

// An open descriptor, closed with its owner.
class Descriptor {
public:
    explicit Descriptor(int number = -1) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept;
    ~Descriptor();

    int get() const { return number_; }
    int release();

private:
    int number_;
};

// Memory of `bytes`, all of it reserved: a full machine is an error here, not a SIGBUS at the first touch.
Descriptor make_memory(std::size_t bytes);

// The number of this process, known without asking the kernel each time.
int this_process();

// A mapping that a forked child neither sees nor spoils.
class Mapping {
public:
    explicit Mapping(const Descriptor& memory);
    Mapping(Mapping&& other) noexcept;
    Mapping(const Mapping&) = delete;
    ~Mapping();

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    int owner_ = 0;  // the process
};

}  // namespace dist_prims
