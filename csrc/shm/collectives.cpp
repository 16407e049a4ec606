#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../common/kernels.h"
#include "../common/trace.h"
#include "in_place.h"

namespace dist_prims {
namespace {

constexpr std::size_t kAlign = 64;  // a chunk begins on a cache line

void transfer(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

// transfer() as an event of its own.
void traced_transfer(std::byte* to, const std::byte* from, std::size_t bytes) {
    const TraceSpan span(TraceKind::kCopy, bytes);
    transfer(to, from, bytes);
}

// Bytes of segment `number`, of a block of `bytes` cut into segments of `length`.
std::size_t segment_bytes(std::size_t bytes, std::size_t length, std::size_t number) {
    const std::size_t begin = number * length;
    return begin >= bytes ? 0 : std::min(length, bytes - begin);
}

std::size_t segment_count(std::size_t bytes, std::size_t length) {
    return std::max<std::size_t>((bytes + length - 1) / length, 1);
}

// The largest piece so that `pieces` of them fit a slot.
std::size_t piece_bytes(const SlotExchange& slots, std::size_t pieces) {
    return slots.capacity() / pieces / kAlign * kAlign;
}

// Reduce in two shots: each rank folds its chunk of every segment and posts it beside its part of the next segment.
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
          chunk_(piece_bytes(slots, ranks_ + 1)) {}

    // `out` may be the input, or null on a rank that wants no result. If `unless_shared` and some rank has its data in
    // a shared tensor, only the first phase runs, and the result is false.
    bool run(std::byte* out, bool unless_shared) {
        const std::size_t per_segment = chunk_ / element_ * ranks_, last = segment_count(count_, per_segment);
        std::size_t done = 0, before = 0;  // where the segment begins whose chunks are summed, and its elements
        for (std::size_t number = 0; number <= last; ++number) {
            const std::size_t begin = number * per_segment,
                              now = number < last ? segment_bytes(count_, per_segment, number) : 0;
            post_input(begin, now);
            slots_.phase();
            if (unless_shared && number == 0 && slots_.shared_tensor_count()) return false;
            const std::size_t mine = edge(now, rank() + 1) - edge(now, rank());
            std::byte* sum = slots_.mine() + ranks_ * chunk_;
            if (now) fold_own(begin, now, sum, mine);
            if (out) collect(out, done, before);
            if (out) transfer(out + (begin + edge(now, rank())) * element_, sum, mine * element_);
            done = begin;
            before = now;
        }
        return true;
    }

private:
    std::size_t rank() const { return static_cast<std::size_t>(slots_.rank()); }
    std::size_t edge(std::size_t elements, std::size_t chunk) const { return chunk * elements / ranks_; }

    void post_input(std::size_t begin, std::size_t elements) {
        const TraceSpan span(TraceKind::kCopy, elements * element_);
        for (std::size_t chunk = 0; chunk < ranks_; ++chunk) {
            const std::size_t from = edge(elements, chunk), to = edge(elements, chunk + 1);
            if (chunk != rank())
                transfer(slots_.mine() + chunk * chunk_, in_ + (begin + from) * element_, (to - from) * element_);
        }
    }

    void fold_own(std::size_t begin, std::size_t elements, std::byte* sum, std::size_t count) {
        const TraceSpan span(TraceKind::kReduce, count * element_);
        std::vector<const void*> each(ranks_);
        for (std::size_t peer = 0; peer < ranks_; ++peer) {
            each[peer] = peer == rank() ? in_ + (begin + edge(elements, rank())) * element_
                                        : slots_.theirs(static_cast<int>(peer)) + rank() * chunk_;
        }
        fold_ranks(op_, dtype_, sum, each, count);
    }

    void collect(std::byte* out, std::size_t begin, std::size_t elements) {
        const TraceSpan span(TraceKind::kCopy, elements * element_);
        for (std::size_t peer = 0; peer < ranks_; ++peer) {
            if (peer == rank()) continue;
            const std::size_t from = edge(elements, peer), to = edge(elements, peer + 1);
            const std::byte* sum = slots_.theirs(static_cast<int>(peer)) + ranks_ * chunk_;
            transfer(out + (begin + from) * element_, sum, (to - from) * element_);
        }
    }

    SlotExchange& slots_;
    const DType dtype_;
    const Op op_;
    const std::byte* in_;
    const std::size_t count_, element_, ranks_, chunk_;
};

void one_shot(SlotExchange& slots, DType dtype, Op op, const std::byte* in, std::byte* out, std::size_t count) {
    const std::size_t bytes = count * size_of(dtype);
    traced_transfer(slots.mine(), in, bytes);
    slots.phase();
    if (!out) return;
    const TraceSpan span(TraceKind::kReduce, bytes);
    std::vector<const void*> each(static_cast<std::size_t>(slots.size()));
    for (int peer = 0; peer < slots.size(); ++peer) each[static_cast<std::size_t>(peer)] = slots.theirs(peer);
    fold_ranks(op, dtype, out, each, count);
}

// Lengths that each rank posts beside its data, so that all see whether what is sent is what is awaited.
class LengthLists {
public:
    explicit LengthLists(SlotExchange& slots)
        : slots_(slots),
          ranks_(static_cast<std::size_t>(slots.size())),
          head_(segment_count(16 * ranks_, kAlign) * kAlign) {}

    // The rest of a slot, for data.
    std::size_t payload_bytes() const { return (slots_.capacity() - head_) / kAlign * kAlign; }
    std::byte* mine() const { return slots_.mine() + head_; }
    const std::byte* theirs(int rank) const { return slots_.theirs(rank) + head_; }

    void post(const std::vector<Counts>& lists) const {
        auto* to = reinterpret_cast<std::uint64_t*>(slots_.mine());
        for (const Counts& list : lists) to = std::copy(list.begin(), list.end(), to);
    }

    std::uint64_t read(int rank, std::size_t list, int index) const {
        return reinterpret_cast<const std::uint64_t*>(
            slots_.theirs(rank))[list * ranks_ + static_cast<std::size_t>(index)];
    }

private:
    SlotExchange& slots_;
    const std::size_t ranks_, head_;
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
    if (bytes <= std::min(host_segment.one_shot, slots.capacity())) return one_shot(slots, dtype, op, in, out, count);
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
    if (count * size_of(dtype) <= std::min(host_segment.one_shot, slots.capacity()))
        one_shot(slots, dtype, op, in, result, count);
    else
        TwoShot(slots, dtype, op, in, count).run(result, false);
}

void reduce_scatter(SlotExchange& slots, DType dtype, Op op, const Blocks& in, std::byte* out, const Counts& counts) {
    const std::size_t element = size_of(dtype), ranks = in.size(), rank = static_cast<std::size_t>(slots.rank());
    const std::size_t piece = piece_bytes(slots, ranks);
    const std::size_t longest = *std::max_element(counts.begin(), counts.end()) * element;
    std::vector<const void*> each(ranks);
    for (std::size_t number = 0, all = segment_count(longest, piece); number < all; ++number) {
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            if (peer == rank) continue;
            traced_transfer(slots.mine() + peer * piece, in[peer] + number * piece,
                            segment_bytes(counts[peer] * element, piece, number));
        }
        slots.phase();
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            each[peer] = peer == rank ? in[rank] + number * piece : slots.theirs(static_cast<int>(peer)) + rank * piece;
        }
        const std::size_t bytes = segment_bytes(counts[rank] * element, piece, number);
        const TraceSpan span(TraceKind::kReduce, bytes);
        if (bytes) fold_ranks(op, dtype, out + number * piece, each, bytes / element);
    }
}

void broadcast(SlotExchange& slots, std::size_t bytes, int root, std::byte* data) {
    const std::size_t piece = piece_bytes(slots, 1);
    for (std::size_t number = 0, all = segment_count(bytes, piece); number < all; ++number) {
        const std::size_t length = segment_bytes(bytes, piece, number);
        if (slots.rank() == root) traced_transfer(slots.mine(), data + number * piece, length);
        slots.phase();
        if (slots.rank() != root) traced_transfer(data + number * piece, slots.theirs(root), length);
    }
}

void all_gather(SlotExchange& slots, const std::byte* in, const Places& out, const Counts& bytes) {
    const std::size_t rank = static_cast<std::size_t>(slots.rank()), piece = piece_bytes(slots, 1);
    const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
    for (std::size_t number = 0, all = segment_count(longest, piece); number < all; ++number) {
        const std::size_t begin = number * piece;
        traced_transfer(slots.mine(), in + begin, segment_bytes(bytes[rank], piece, number));
        slots.phase();
        for (std::size_t peer = 0; peer < out.size(); ++peer) {
            const std::byte* from = peer == rank ? in + begin : slots.theirs(static_cast<int>(peer));
            traced_transfer(out[peer] + begin, from, segment_bytes(bytes[peer], piece, number));
        }
    }
}

void gather(SlotExchange& slots, int root, const std::byte* in, std::size_t bytes, const Places& out,
            const Counts& incoming) {
    const LengthLists lists(slots);
    if (slots.rank() == root) lists.post({incoming});
    std::size_t all = 1;  // not known before the others have posted their lengths
    for (std::size_t number = 0; number < all; ++number) {
        const std::size_t begin = number * lists.payload_bytes();
        if (slots.rank() != root)
            traced_transfer(lists.mine(), in + begin, segment_bytes(bytes, lists.payload_bytes(), number));
        slots.phase();
        if (number == 0) {
            for (int peer = 0; peer < slots.size(); ++peer)
                must_match(slots.rank(), "gather", peer, slots.call(peer).longest, root, lists.read(root, 0, peer));
            all = segment_count(slots.longest(), lists.payload_bytes());
        }
        if (slots.rank() != root) continue;
        for (std::size_t peer = 0; peer < out.size(); ++peer) {
            const bool own = static_cast<int>(peer) == root;
            const std::byte* from = own ? in + begin : lists.theirs(static_cast<int>(peer));
            traced_transfer(out[peer] + begin, from, segment_bytes(incoming[peer], lists.payload_bytes(), number));
        }
    }
}

void scatter(SlotExchange& slots, int root, const Blocks& in, std::byte* out, std::size_t bytes) {
    const std::size_t ranks = static_cast<std::size_t>(slots.size()), rank = static_cast<std::size_t>(slots.rank());
    const std::size_t piece = piece_bytes(slots, ranks);
    for (std::size_t number = 0, all = segment_count(bytes, piece); number < all; ++number) {
        const std::size_t begin = number * piece, length = segment_bytes(bytes, piece, number);
        for (std::size_t peer = 0; peer < in.size(); ++peer) {  // empty but on the root
            if (peer != rank) traced_transfer(slots.mine() + peer * piece, in[peer] + begin, length);
        }
        slots.phase();
        traced_transfer(out + begin, in.empty() ? slots.theirs(root) + rank * piece : in[rank] + begin, length);
    }
}

void all_to_all(SlotExchange& slots, const Blocks& in, const Counts& outgoing, const Places& out,
                const Counts& incoming) {
    const LengthLists lists(slots);
    const std::size_t ranks = in.size(), rank = static_cast<std::size_t>(slots.rank());
    const std::size_t piece = lists.payload_bytes() / ranks / kAlign * kAlign;
    std::size_t all = 1;
    lists.post({outgoing, incoming});
    for (std::size_t number = 0; number < all; ++number) {
        const std::size_t begin = number * piece;
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            if (peer != rank)
                traced_transfer(lists.mine() + peer * piece, in[peer] + begin,
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
            traced_transfer(out[peer] + begin, from, segment_bytes(incoming[peer], piece, number));
        }
    }
}

void barrier(SlotExchange& slots) {
    slots.phase();
}

}  // namespace dist_prims
