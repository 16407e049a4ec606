#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "../common/kernels.h"
#include "../common/trace.h"
#include "in_place.h"

namespace dist_prims {
namespace {

// Writes data to a part of this rank's slot, as an event of the trace.
void post(SlotExchange& slots, std::byte* to, const std::byte* from, std::size_t bytes) {
    const TraceSpan span(TraceKind::kCopy, bytes);
    slots.writer().write(to, from, bytes);
}

// Whether a rank takes the cache lines of data that it reads. `readers`: of each part of the data; `bytes`: all that
// the rank reads in the call. Larger data has left the caches of the cores when a slot is used again.
bool takes_lines(std::size_t readers, std::size_t bytes) {
    return readers == 1 && bytes <= 256 << 10;
}

// Copies data, as an event of the trace. `takes`: the data is in another rank's slot, and no other rank reads it.
void collect(std::byte* to, const std::byte* from, std::size_t bytes, bool takes) {
    const TraceSpan span(TraceKind::kCopy, bytes);
    if (takes) return copy_and_take(to, from, bytes);
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

// fold_ranks() of the input of this rank, inputs[rank], and of data in the slots of the other ranks. `takes`: no other
// rank reads that data.
void fold_slots(Op op, DType dtype, std::byte* out, const std::vector<const void*>& inputs, std::size_t count,
                std::size_t rank, bool takes) {
    if (!takes) return fold_ranks(op, dtype, out, inputs, count);
    const std::size_t element = size_of(dtype);
    std::vector<const void*> blocks(inputs.size());
    for_blocks(count * element, [&](std::size_t begin, std::size_t length) {
        for (std::size_t peer = 0; peer < inputs.size(); ++peer)
            blocks[peer] = static_cast<const std::byte*>(inputs[peer]) + begin;
        fold_ranks(op, dtype, out + begin, blocks, length / element);
        for (std::size_t peer = 0; peer < inputs.size(); ++peer) {
            if (peer != rank) take_lines(blocks[peer], length);
        }
    });
}

// The bytes of segment `number`, if `bytes` are cut into segments of `length`; 0 behind the end.
std::size_t segment_bytes(std::size_t bytes, std::size_t length, std::size_t number) {
    const std::size_t begin = number * length;
    return begin >= bytes ? 0 : std::min(length, bytes - begin);
}

// The number of segments: at least 1, because each call has a first phase.
std::size_t segment_count(std::size_t bytes, std::size_t length) {
    return std::max<std::size_t>((bytes + length - 1) / length, 1);
}

// The length of a piece, if a slot holds `pieces` of them.
std::size_t piece_bytes(const SlotExchange& slots, std::size_t pieces) {
    return slots.capacity() / pieces / kCacheLine * kCacheLine;
}

// An all-reduce in two shots: each rank sums its own chunk of a segment, then all ranks collect the sums. A rank posts
// the sum of its chunk beside its input of the next segment, so a segment costs one phase. Offsets and counts are
// elements here. phase() makes mine() the slot of the next phase.
//
//     slot of rank 1, phase n   | chunk 0 of segment n |    -    | chunk 2 of segment n | sum of chunk 1, segment n - 1
class TwoShot {
public:
    TwoShot(SlotExchange& slots, DType dtype, Op op, const std::byte* in, std::size_t count)
        : slots_(slots),
          dtype_(dtype),
          op_(op),
          in_(in),
          count_(count),
          element_(size_of(dtype)),
          ranks_(static_cast<std::size_t>(slots.size())),
          chunk_(piece_bytes(slots, ranks_ + 1)),
          takes_(takes_lines(ranks_ - 1, count * element_)) {}

    // `out` may be the input, or null on a rank that gets no result. With `stops_if_shared`, only the first phase runs
    // if some rank has its data in a shared tensor, and the result is false.
    bool run(std::byte* out, bool stops_if_shared) {
        const std::size_t longest = chunk_ / element_ * ranks_, segments = segment_count(count_, longest);
        Segment previous{0, 0};
        for (std::size_t number = 0; number <= segments; ++number) {  // in the last phase there are only sums to post
            // 1. Post the input, beside the sum that step 2 of the previous segment has written.
            const Segment segment{number * longest, number < segments ? segment_bytes(count_, longest, number) : 0};
            post_input(segment);
            slots_.phase();
            if (stops_if_shared && number == 0 && slots_.shared_tensor_count()) return false;
            // 2. Sum the own chunk, and post it beside the input of the next segment. `out` may be the input.
            if (segment.count) sum_own_chunk(segment, out, slots_.mine() + ranks_ * chunk_);
            // 3. Collect the sums that the other ranks have posted of the previous segment.
            if (out) collect_sums(out, previous);
            previous = segment;
        }
        return true;
    }

private:
    struct Segment {
        std::size_t begin, count;
    };

    std::size_t rank() const { return static_cast<std::size_t>(slots_.rank()); }
    // The part of a segment that a rank sums.
    Segment chunk(const Segment& segment, std::size_t rank) const {
        const std::size_t begin = rank * segment.count / ranks_, end = (rank + 1) * segment.count / ranks_;
        return {segment.begin + begin, end - begin};
    }

    void post_input(const Segment& segment) {
        for (std::size_t peer = 0; peer < ranks_; ++peer) {
            const Segment part = chunk(segment, peer);
            if (peer != rank())
                post(slots_, slots_.mine() + peer * chunk_, in_ + part.begin * element_, part.count * element_);
        }
    }

    // The sums are computed in `out` and copied to `posted`, which is in the slot of the next phase. memcpy writes
    // cache lines that another core has read 2 to 5 times faster than a loop that stores one vector after the other.
    void sum_own_chunk(const Segment& segment, std::byte* out, std::byte* posted) {
        const Segment own = chunk(segment, rank());
        const TraceSpan span(TraceKind::kReduce, own.count * element_);
        std::vector<const void*> inputs(ranks_);
        for (std::size_t peer = 0; peer < ranks_; ++peer)
            inputs[peer] = slots_.theirs(static_cast<int>(peer)) + rank() * chunk_;
        inputs[rank()] = in_ + own.begin * element_;
        std::byte* sum = out ? out + own.begin * element_ : posted;
        fold_slots(op_, dtype_, sum, inputs, own.count, rank(), takes_);
        if (out) slots_.writer().write(posted, sum, own.count * element_);
    }

    void collect_sums(std::byte* out, const Segment& segment) {
        for (std::size_t peer = 0; peer < ranks_; ++peer) {
            const Segment part = chunk(segment, peer);
            const std::byte* sum = slots_.theirs(static_cast<int>(peer)) + ranks_ * chunk_;
            if (peer != rank()) collect(out + part.begin * element_, sum, part.count * element_, takes_);
        }
    }

    SlotExchange& slots_;
    const DType dtype_;
    const Op op_;
    const std::byte* in_;
    const std::size_t count_, element_;  // the elements of the data; the bytes of an element
    const std::size_t ranks_, chunk_;    // the bytes of a chunk in the slot
    const bool takes_;                   // whether this call takes cache lines
};

// Each rank posts all of its data, and reduces the data of all ranks. `out`: null on a rank that gets no result.
void one_shot(SlotExchange& slots, DType dtype, Op op, const std::byte* in, std::byte* out, std::size_t count) {
    const std::size_t bytes = count * size_of(dtype);
    post(slots, slots.mine(), in, bytes);
    slots.phase();
    if (!out) return;
    const TraceSpan span(TraceKind::kReduce, bytes);
    std::vector<const void*> inputs;
    for (int peer = 0; peer < slots.size(); ++peer) inputs.push_back(peer == slots.rank() ? in : slots.theirs(peer));
    fold_slots(op, dtype, out, inputs, count, static_cast<std::size_t>(slots.rank()),
               takes_lines(inputs.size() - 1, bytes));
}

// Lists of lengths that each rank posts in front of its data, so that all ranks see whether each rank sends as many
// bytes as the receiver expects. A list has a length in bytes for each rank; a slot has space for two lists.
class LengthLists {
public:
    explicit LengthLists(SlotExchange& slots)
        : slots_(slots),
          ranks_(static_cast<std::size_t>(slots.size())),
          head_(round_up_to_line(2 * sizeof(std::uint64_t) * ranks_)) {}

    // The rest of a slot, for data.
    std::size_t payload_bytes() const { return (slots_.capacity() - head_) / kCacheLine * kCacheLine; }
    std::byte* mine() const { return slots_.mine() + head_; }
    const std::byte* theirs(int rank) const { return slots_.theirs(rank) + head_; }

    void post(const std::vector<Counts>& lists) const {
        auto* to = reinterpret_cast<std::uint64_t*>(slots_.mine());
        for (const Counts& list : lists) to = std::copy(list.begin(), list.end(), to);
    }

    // The entry for the rank `index` in one of the lists that `rank` has posted. Valid after the phase.
    std::uint64_t read(int rank, std::size_t list, int index) const {
        const auto* lists = reinterpret_cast<const std::uint64_t*>(slots_.theirs(rank));
        return lists[list * ranks_ + static_cast<std::size_t>(index)];
    }

private:
    SlotExchange& slots_;
    const std::size_t ranks_, head_;  // head_: the bytes of both lists
};

}  // namespace

void must_match(int rank, const char* what, int from, std::uint64_t sent, int to, std::uint64_t awaited) {
    if (sent == awaited) return;
    const auto number = [](auto value) { return std::to_string(value); };
    throw CommError(CommError::Kind::kMismatch, "rank " + number(rank) + ": ranks disagree in " + what +
                                                    ", no data was touched. Rank " + number(from) + " sends " +
                                                    number(sent) + " bytes to rank " + number(to) + ", which expects " +
                                                    number(awaited));
}

void all_reduce(HostSegment& host_segment, DType dtype, Op op, const std::byte* in, std::byte* out, std::size_t count,
                const SharedTensorRef& mine) {
    SlotExchange& slots = host_segment.slots;
    const std::size_t bytes = count * size_of(dtype);
    if (bytes <= std::min(host_segment.one_shot_bytes, slots.capacity()))
        return one_shot(slots, dtype, op, in, out, count);
    // All ranks see in the first phase which ranks have their data in shared tensors. If none has, TwoShot goes on; if
    // some have, all ranks begin TwoShot again; if all have, they reduce in place.
    TwoShot two_shot(slots, dtype, op, in, count);
    if (!mine.is_shared()) {
        if (!two_shot.run(out, true)) two_shot.run(out, false);
        return;
    }
    const bool is_done = in_shared_memory(out, bytes, [&] {
        slots.phase();
        const MappedTensors mapped = map_tensors(host_segment, tensor_refs_of(slots), out);
        if (mapped.empty()) return false;
        InPlace(slots.rank(), dtype, op, mapped.places).fold_share(bytes, {});
        finish_in_place(host_segment, out, bytes);
        return true;
    });
    if (!is_done) two_shot.run(out, false);
}

void all_reduce_by_slots(SlotExchange& slots, DType dtype, Op op, const std::byte* in, std::byte* out,
                         std::size_t count) {
    TwoShot(slots, dtype, op, in, count).run(out, false);
}

void reduce(HostSegment& host_segment, DType dtype, Op op, int root, const std::byte* in, std::byte* out,
            std::size_t count) {
    SlotExchange& slots = host_segment.slots;
    std::byte* result = slots.rank() == root ? out : nullptr;
    if (count * size_of(dtype) <= std::min(host_segment.one_shot_bytes, slots.capacity()))
        one_shot(slots, dtype, op, in, result, count);
    else
        TwoShot(slots, dtype, op, in, count).run(result, false);
}

void reduce_scatter(SlotExchange& slots, DType dtype, Op op, const Blocks& in, std::byte* out, const Counts& counts) {
    const std::size_t element = size_of(dtype), ranks = in.size(), rank = static_cast<std::size_t>(slots.rank());
    const std::size_t piece = piece_bytes(slots, ranks);
    const std::size_t longest = *std::max_element(counts.begin(), counts.end()) * element;
    const bool takes = takes_lines(1, (ranks - 1) * counts[rank] * element);
    std::vector<const void*> inputs(ranks);
    for (std::size_t number = 0, all = segment_count(longest, piece); number < all; ++number) {
        const std::size_t begin = number * piece, bytes = segment_bytes(counts[rank] * element, piece, number);
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            if (peer != rank)
                post(slots, slots.mine() + peer * piece, in[peer] + begin,
                     segment_bytes(counts[peer] * element, piece, number));
        }
        slots.phase();
        for (std::size_t peer = 0; peer < ranks; ++peer)
            inputs[peer] = peer == rank ? in[rank] + begin : slots.theirs(static_cast<int>(peer)) + rank * piece;
        const TraceSpan span(TraceKind::kReduce, bytes);
        if (bytes) fold_slots(op, dtype, out + begin, inputs, bytes / element, rank, takes);
    }
}

void broadcast(SlotExchange& slots, std::size_t bytes, int root, std::byte* data) {
    const std::size_t piece = piece_bytes(slots, 1);
    const bool takes = takes_lines(static_cast<std::size_t>(slots.size()) - 1, bytes);
    for (std::size_t number = 0, all = segment_count(bytes, piece); number < all; ++number) {
        const std::size_t length = segment_bytes(bytes, piece, number);
        if (slots.rank() == root) post(slots, slots.mine(), data + number * piece, length);
        slots.phase();
        if (slots.rank() != root) collect(data + number * piece, slots.theirs(root), length, takes);
    }
}

void all_gather(SlotExchange& slots, const std::byte* in, const Places& out, const Counts& bytes) {
    const std::size_t rank = static_cast<std::size_t>(slots.rank()), piece = piece_bytes(slots, 1);
    const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
    const bool takes = takes_lines(out.size() - 1, longest);
    for (std::size_t number = 0, all = segment_count(longest, piece); number < all; ++number) {
        const std::size_t begin = number * piece;
        post(slots, slots.mine(), in + begin, segment_bytes(bytes[rank], piece, number));
        slots.phase();
        for (std::size_t peer = 0; peer < out.size(); ++peer) {
            const std::byte* from = peer == rank ? in + begin : slots.theirs(static_cast<int>(peer));
            collect(out[peer] + begin, from, segment_bytes(bytes[peer], piece, number), takes && peer != rank);
        }
    }
}

void gather(SlotExchange& slots, int root, const std::byte* in, std::size_t bytes, const Places& out,
            const Counts& incoming) {
    const LengthLists lists(slots);
    if (slots.rank() == root) lists.post({incoming});
    const bool takes = takes_lines(1, std::accumulate(incoming.begin(), incoming.end(), std::uint64_t{0}));
    std::size_t all = 1;  // segments; not known before the first phase, in which all ranks post their lengths
    for (std::size_t number = 0; number < all; ++number) {
        const std::size_t begin = number * lists.payload_bytes();
        if (slots.rank() != root)
            post(slots, lists.mine(), in + begin, segment_bytes(bytes, lists.payload_bytes(), number));
        slots.phase();
        if (number == 0) {
            for (int peer = 0; peer < slots.size(); ++peer)
                // The longest block of a rank's call is what the rank sends.
                must_match(slots.rank(), "gather", peer, slots.call(peer).longest, root, lists.read(root, 0, peer));
            all = segment_count(slots.longest(), lists.payload_bytes());
        }
        if (slots.rank() != root) continue;
        for (std::size_t peer = 0; peer < out.size(); ++peer) {
            const int rank = static_cast<int>(peer);
            const std::byte* from = rank == root ? in + begin : lists.theirs(rank);
            collect(out[peer] + begin, from, segment_bytes(incoming[peer], lists.payload_bytes(), number),
                    takes && rank != root);
        }
    }
}

void scatter(SlotExchange& slots, int root, const Blocks& in, std::byte* out, std::size_t bytes) {
    const std::size_t ranks = static_cast<std::size_t>(slots.size()), rank = static_cast<std::size_t>(slots.rank());
    const std::size_t piece = piece_bytes(slots, ranks);
    for (std::size_t number = 0, all = segment_count(bytes, piece); number < all; ++number) {
        const std::size_t begin = number * piece, length = segment_bytes(bytes, piece, number);
        for (std::size_t peer = 0; peer < in.size(); ++peer) {  // `in` is empty except on the root
            if (peer != rank) post(slots, slots.mine() + peer * piece, in[peer] + begin, length);
        }
        slots.phase();
        const bool is_root = !in.empty();
        collect(out + begin, is_root ? in[rank] + begin : slots.theirs(root) + rank * piece, length,
                takes_lines(1, bytes) && !is_root);
    }
}

void all_to_all(SlotExchange& slots, const Blocks& in, const Counts& outgoing, const Places& out,
                const Counts& incoming) {
    const LengthLists lists(slots);
    const std::size_t ranks = in.size(), rank = static_cast<std::size_t>(slots.rank());
    const std::size_t piece = lists.payload_bytes() / ranks / kCacheLine * kCacheLine;
    const bool takes = takes_lines(1, std::accumulate(incoming.begin(), incoming.end(), std::uint64_t{0}));
    std::size_t all = 1;  // as in gather()
    lists.post({outgoing, incoming});
    for (std::size_t number = 0; number < all; ++number) {
        const std::size_t begin = number * piece;
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            if (peer != rank)
                post(slots, lists.mine() + peer * piece, in[peer] + begin,
                     segment_bytes(outgoing[peer], piece, number));
        }
        slots.phase();
        if (number == 0) {
            for (int from = 0; from < slots.size(); ++from) {
                for (int to = 0; to < slots.size(); ++to)
                    must_match(slots.rank(), "all_to_all", from, lists.read(from, 0, to), to, lists.read(to, 1, from));
            }
            all = segment_count(slots.longest(), piece);
        }
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            const std::byte* from =
                peer == rank ? in[rank] + begin : lists.theirs(static_cast<int>(peer)) + rank * piece;
            collect(out[peer] + begin, from, segment_bytes(incoming[peer], piece, number), takes && peer != rank);
        }
    }
}

void barrier(SlotExchange& slots) {
    slots.phase();
}

}  // namespace dist_prims
