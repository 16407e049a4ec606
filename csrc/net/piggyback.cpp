#include "piggyback.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "../common/kernels.h"
#include "../common/trace.h"

namespace dist_prims {
namespace {

constexpr int kEvery = -1;  // as a target: all ranks of a host, because they get the same block

void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
}

// Where the blocks of this rank begin on one side, input or output; null unless they follow each other in memory.
template <typename Byte>
Byte* contiguous(const ProgramBuffer& buffer, Byte* ProgramBuffer::Block::* side, std::size_t element_bytes) {
    Byte *begin = nullptr, *end = nullptr;
    for (const auto& block : buffer.blocks) {
        const std::size_t bytes = block.*side ? block.count * element_bytes : 0;
        if (bytes == 0) continue;
        if (!begin) begin = end = block.*side;
        if (block.*side != end) return nullptr;
        end += bytes;
    }
    return begin;
}

}  // namespace

Piggyback::Piggyback(const Hosts& hosts, int rank, const Call& call, const ProgramBuffer& buffer)
    : hosts_(hosts),
      rank_(rank),
      call_(call),
      buffer_(buffer),
      shape_(shape_of(call.collective)),
      element_bytes_(size_of(call.dtype)) {}

Piggyback::Shape Piggyback::shape_of(Collective collective) {
    using enum Collective;
    const auto is_in = [collective](std::initializer_list<Collective> listed) {
        return std::ranges::find(listed, collective) != listed.end();
    };
    return {
        .reduces = is_in({kAllReduce, kReduce, kReduceScatter}),
        .addressed = is_in({kReduceScatter, kScatter, kAllToAll}),
        .from_root = is_in({kBroadcast, kScatter}),
        .to_root = is_in({kReduce, kGather}),
    };
}

std::size_t Piggyback::most_bytes(const Hosts& hosts, Collective collective, std::size_t bytes) {
    return collective == Collective::kAllToAll ? static_cast<std::size_t>(std::ranges::max(hosts.sizes())) * bytes
                                               : bytes;
}

bool Piggyback::is_for_all(Collective collective) {
    const Shape shape = shape_of(collective);
    return !shape.addressed && !shape.to_root;
}

bool Piggyback::is_root_on(std::size_t host) const {
    return std::ranges::find(hosts_.ranks[host], call_.root) != hosts_.ranks[host].end();
}

// The ranks of a host that have a row.
std::vector<int> Piggyback::sources(std::size_t host) const {
    if (!shape_.from_root) return hosts_.ranks[host];
    return is_root_on(host) ? std::vector<int>{call_.root} : std::vector<int>{};
}

// The ranks of a host that get blocks of their own, or kEvery if all get the same.
std::vector<int> Piggyback::targets(std::size_t host) const {
    if (shape_.addressed) return hosts_.ranks[host];
    return shape_.to_root && !is_root_on(host) ? std::vector<int>{} : std::vector<int>{kEvery};
}

// The elements of the block from one rank for another. The buffer has one block (all_reduce, reduce, broadcast), or a
// block for each target, or, if all targets get the same, a block for each source. Elsewhere callers give source 0.
std::size_t Piggyback::block_count(int source, int target) const {
    const auto& blocks = buffer_.blocks;
    return blocks[blocks.size() == 1 ? 0 : static_cast<std::size_t>(target == kEvery ? source : target)].count;
}

// Where the block for a rank begins in a row, in bytes.
std::size_t Piggyback::offset_in_row(int target) const {
    std::size_t before = 0;
    for (int rank = 0; rank < target; ++rank) before += block_bytes(0, rank);
    return before;
}

const std::byte* Piggyback::row_in_place() const {
    return contiguous(buffer_, &ProgramBuffer::Block::input, element_bytes_);
}

std::byte* Piggyback::result_in_place() const {
    return contiguous(buffer_, &ProgramBuffer::Block::output, element_bytes_);
}

void Piggyback::write_row(std::byte* row) const {
    for (const auto& block : buffer_.blocks) {
        const std::size_t bytes = block.input ? block.count * element_bytes_ : 0;
        copy(row, block.input, bytes);
        row += bytes;
    }
}

// Where the blocks for this rank begin in the result of its host, in bytes.
std::size_t Piggyback::offset_in_result() const {
    std::size_t before = 0;
    for (const int target : targets(hosts_.mine)) {
        if (target == kEvery || target == rank_) break;
        before += shape_.reduces ? block_bytes(0, target) : bytes_of_all_sources(target);
    }
    return before;
}

std::size_t Piggyback::bytes_of_all_sources(int target) const {
    std::size_t bytes = 0;
    for (std::size_t host = 0; host < hosts_.ranks.size(); ++host) {
        for (const int source : sources(host)) bytes += block_bytes(source, target);
    }
    return bytes;
}

void Piggyback::copy_outputs(const std::byte* result) const {
    result += offset_in_result();
    for (const auto& block : buffer_.blocks) {
        const std::size_t bytes = block.output ? block.count * element_bytes_ : 0;
        copy(block.output, result, bytes);
        result += bytes;
    }
}

std::size_t Piggyback::message_bytes(std::size_t from, std::size_t to) const {
    std::size_t bytes = 0;
    for (const int target : targets(to)) {
        if (shape_.reduces) {
            bytes += block_bytes(0, target);
        } else {
            for (const int source : sources(from)) bytes += block_bytes(source, target);
        }
    }
    return bytes;
}

void Piggyback::pack_message(std::size_t to, const std::vector<const std::byte*>& rows, std::byte* message) const {
    const TraceSpan span(shape_.reduces ? TraceKind::kReduce : TraceKind::kCopy, message_bytes(hosts_.mine, to));
    const std::vector<int>& here = hosts_.ranks[hosts_.mine];
    const std::vector<int> from = sources(hosts_.mine);
    for (const int target : targets(to)) {
        // 1. The blocks for the target, in the rows of this host: copied one after the other, unless they are added.
        std::vector<const void*> operands;
        const std::size_t offset = shape_.addressed ? offset_in_row(target) : 0;
        for (std::size_t local_rank = 0; local_rank < here.size(); ++local_rank) {
            if (std::ranges::find(from, here[local_rank]) == from.end()) continue;
            operands.push_back(rows[local_rank] + offset);
            if (shape_.reduces) continue;
            const std::size_t bytes = block_bytes(here[local_rank], target);
            copy(message, rows[local_rank] + offset, bytes);
            message += bytes;
        }
        // 2. Their sum.
        if (!shape_.reduces) continue;
        fold_terms(call_.op, call_.dtype, message, operands, {}, hosts_.size(), block_count(0, target));
        message += block_bytes(0, target);
    }
}

void Piggyback::combine(const std::vector<const std::byte*>& messages, std::byte* result) const {
    const std::size_t bytes = message_bytes(hosts_.mine, hosts_.mine);
    const TraceSpan span(shape_.reduces ? TraceKind::kReduce : TraceKind::kCopy, bytes);
    if (!shape_.reduces) return combine_blocks(messages, result);
    if (bytes == 0) return;
    fold_terms(call_.op, call_.dtype, result, {messages.begin(), messages.end()}, hosts_.sizes(), hosts_.size(),
               bytes / element_bytes_);
}

// The result of a collective that does not reduce: for each target the blocks of all sources, in the order of ranks.
void Piggyback::combine_blocks(std::vector<const std::byte*> messages, std::byte* result) const {
    const std::vector<std::size_t> host_of = hosts_.by_rank();
    for (const int target : targets(hosts_.mine)) {
        for (int source = 0; source < hosts_.size(); ++source) {
            if (shape_.from_root && source != call_.root) continue;
            const std::size_t bytes = block_bytes(source, target);
            const std::byte*& next = messages[host_of[static_cast<std::size_t>(source)]];
            copy(result, next, bytes);
            next += bytes;
            result += bytes;
        }
    }
}

}  // namespace dist_prims
