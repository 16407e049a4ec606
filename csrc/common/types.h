// Types that describe data: element types, reductions, and the announcement that each call of a collective begins with.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shared_memory.h"

namespace dist_prims {

enum class DType : std::uint8_t {
    kUInt8,
    kInt8,
    kUInt16,
    kInt16,
    kUInt32,
    kInt32,
    kUInt64,
    kInt64,
    kFloat16,
    kBFloat16,
    kFloat32,
    kFloat64,
    kComplex64,
    kComplex128,
    kBool,
    kWithoutKernel = 64,  // and above, for movement only: float8 and others, by their number in torch; see name_dtype()
};

enum class Op : std::uint8_t { kSum, kAvg, kPremulSum, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor, kNone };

enum class Collective : std::uint8_t {
    kAllReduce,
    kReduceScatter,
    kAllGather,
    kBroadcast,
    kReduce,
    kGather,
    kScatter,
    kAllToAll,
    kBarrier,
};

std::size_t size_of(DType dtype);
const char* name_of(DType dtype);
// Sets the name and size in bytes of a type without a kernel. The adapter calls it for all types of its torch when it
// is loaded.
void name_dtype(DType dtype, const std::string& name, std::size_t size);
const char* name_of(Op op);
const char* name_of(Collective collective);
Collective collective_of(const std::string& name);

// Whether the reduction is defined for the type; if not, why not.
bool reduces(Op op, DType dtype, std::string* reason);

// A reference to memory of a rank that its peers can map; see shm/shared_tensors.h.
struct SharedTensorRef {
    FileId file;  // the arena's file; zero: the data lies in ordinary memory
    std::uint64_t offset = 0;
    std::int32_t descriptor = -1;
    std::int32_t spare = 0;

    bool is_shared() const { return file.inode != 0; }
};

// The announcement of a call, in plain fields, so that an error can show both sides when two ranks differ. A change of
// the fields must raise PROTOCOL in dist_prims/rendezvous/handshake.py.
struct Call {
    std::uint64_t sequence = 0;  // the number of the call, from 1; 0: the first agreement of a new group
    std::uint64_t count = 0;     // elements in all, where the ranks must agree on them
    std::uint64_t layout = 0;    // a checksum of the blocks' lengths, where the ranks must agree on them
    std::uint64_t longest = 0;   // bytes of this rank's longest block; ranks may differ
    std::int32_t root = -1;      // where there is one
    Collective collective = Collective::kBarrier;
    DType dtype = DType::kUInt8;
    Op op = Op::kNone;
    std::uint8_t spare = 0;
    std::array<char, 48> algorithm{};  // pinned by name; empty: the native one
    SharedTensorRef tensor_ref;        // where the data is; ranks may differ

    void set_algorithm(const std::string& name);
    bool agrees_with(const Call& other) const;
    std::uint64_t checksum() const;  // of what agrees_with() compares
    std::string text() const;
};

}  // namespace dist_prims
