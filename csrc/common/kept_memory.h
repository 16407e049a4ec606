// Memory for staging that the process keeps between collectives. Memory that malloc has just got from the operating
// system costs a page fault for each 4 KB, which took 2 us on a virtual machine: more than the copy into it.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace dist_prims {

// Memory of one owner. When the owner ends, the memory goes back to the pool of the process.
class KeptMemory {
public:
    static constexpr std::size_t kLeast = 64 << 10;  // bytes; malloc keeps smaller memory
    static constexpr std::size_t kMost = 64 << 20;   // bytes that the process keeps; the oldest are released first

    // Memory of at least so many bytes, not initialized.
    static KeptMemory take(std::size_t bytes);

    KeptMemory(KeptMemory&& other) noexcept = default;
    KeptMemory& operator=(KeptMemory&& other) = delete;
    ~KeptMemory();

    std::byte* data() const { return data_.get(); }
    std::size_t bytes() const { return bytes_; }

    // What the process keeps at present, in bytes.
    static std::size_t kept();

private:
    class Pool;

    KeptMemory(std::unique_ptr<std::byte[]> data, std::size_t bytes) : data_(std::move(data)), bytes_(bytes) {}
    static Pool& pool();

    std::unique_ptr<std::byte[]> data_;
    std::size_t bytes_;
};

}  // namespace dist_prims
