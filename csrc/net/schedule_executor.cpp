#include "schedule_executor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "../common/kept_memory.h"
#include "../common/kernels.h"
#include "../common/trace.h"

namespace dist_prims {
namespace {

constexpr std::size_t kCheapToCopy = 64 << 10;
constexpr std::size_t kLanes = 2;

// Staging buffers of one collective, reused from step to step. Requests to other hosts share ownership of them, and of
// the data, so a transport that cannot release memory at once never touches memory that is in use again.
class StagingBuffers {
public:
    struct Buffer {
        std::byte* data;
        std::size_t bytes;
    };

    explicit StagingBuffers(std::shared_ptr<const void> data) : data_(std::move(data)) {}

    // A buffer that is in use until give_back().
    std::byte* take(std::size_t bytes, std::vector<Buffer>& taken) {
        auto found = std::find_if(free_.begin(), free_.end(), [&](const Buffer& each) { return each.bytes >= bytes; });
        if (found == free_.end()) {
            all_.push_back(KeptMemory::take(bytes));
            taken.push_back({all_.back().data(), all_.back().bytes()});
        } else {
            taken.push_back(*found);
            free_.erase(found);
        }
        return taken.back().data;
    }
    void give_back(std::vector<Buffer>& taken) {
        free_.insert(free_.end(), taken.begin(), taken.end());
        taken.clear();
    }

private:
    const std::shared_ptr<const void> data_;
    std::vector<KeptMemory> all_;
    std::list<Buffer> free_;
};

// A segment of a piece of the data; see ProgramBuffer::Block.
struct Part {
    const std::byte* input;
    std::byte* output;
    std::size_t bytes;
};

// The pieces of one segment. Data that is one whole is cut into segments first, so that the pieces of a segment lie
// side by side; blocks of ranks stay what they are.
std::vector<Part> parts(const RankProgram& program, const ProgramBuffer& buffer, std::size_t element,
                        std::size_t segment, std::size_t segments) {
    std::vector<Part> found;
    const auto add = [&](const ProgramBuffer::Block& block, std::size_t begin, std::size_t end) {
        const auto at = [&](auto* memory) { return memory ? memory + begin * element : nullptr; };
        found.push_back({at(block.input), at(block.output), (end - begin) * element});
    };
    const std::size_t pieces = static_cast<std::size_t>(program.chunks) / buffer.blocks.size();  // of a block
    for (const ProgramBuffer::Block& block : buffer.blocks) {
        if (buffer.is_whole()) {
            const std::size_t begin = segment * block.count / segments,
                              all = (segment + 1) * block.count / segments - begin;
            for (std::size_t piece = 0; piece < pieces; ++piece)
                add(block, begin + piece * all / pieces, begin + (piece + 1) * all / pieces);
            continue;
        }
        for (std::size_t piece = 0; piece < pieces; ++piece) {
            const std::size_t begin = piece * block.count / pieces, all = (piece + 1) * block.count / pieces - begin;
            add(block, begin + segment * all / segments, begin + (segment + 1) * all / segments);
        }
    }
    return found;
}

// The execution of the program on one segment.
class SegmentExecution {
public:
    // `is_written`: by chunk; no other chunk needs memory of its own.
    SegmentExecution(const RankProgram& program, const std::vector<bool>& is_written, Router& router,
                     const std::shared_ptr<StagingBuffers>& buffers, DType dtype, Op op, const ProgramBuffer& buffer,
                     std::size_t segment, std::size_t segments, std::chrono::milliseconds timeout)
        : program_(program),
          router_(router),
          number_(router.next()),
          buffers_(buffers),
          dtype_(dtype),
          op_(op),
          element_(size_of(dtype)),
          timeout_(timeout),
          segment_(segment),
          parts_(parts(program, buffer, element_, segment, segments)),
          is_used_(static_cast<std::size_t>(program.chunks + program.scratch)) {
        const auto needs_memory = [&](std::size_t piece) { return !parts_[piece].output && is_written[piece]; };
        std::size_t longest = 0, without_output = 0;
        for (std::size_t piece = 0; piece < parts_.size(); ++piece) {
            longest = std::max(longest, parts_[piece].bytes);
            if (needs_memory(piece)) without_output += parts_[piece].bytes;
        }
        std::byte* next = without_output ? buffers_->take(without_output, mine_) : nullptr;
        for (std::size_t piece = 0; piece < parts_.size(); ++piece) {
            const Part& part = parts_[piece];
            std::byte* const target = needs_memory(piece) ? std::exchange(next, next + part.bytes) : part.output;
            chunks_.push_back({part.input ? part.input : target, target});
        }
        for (int chunk = 0; chunk < program.scratch; ++chunk) {
            std::byte* const target = buffers_->take(longest, mine_);
            chunks_.push_back({target, target});
        }
    }

    // Finishes the current step and begins the next; returns false after the last.
    bool advance() {
        if (begun_ > 0) {
            trace_.resume();
            finish(program_.steps[begun_ - 1]);
            trace_.end();
        }
        if (begun_ == program_.steps.size()) {
            deliver();
            buffers_->give_back(mine_);
            return false;
        }
        trace_ = TraceStep(begun_, segment_);
        begin(program_.steps[begun_++]);
        return true;
    }

private:
    // Where the contents of a chunk are, and where the program writes them.
    struct Chunk {
        const std::byte* contents;
        std::byte* target;
    };
    // The place of a message, and the bytes before each of its chunks.
    struct ReceiveBuffer {
        std::byte* place;
        std::vector<std::size_t> offsets;
    };
    // What a step receives.
    struct StepReceives {
        std::map<int, ReceiveBuffer> receive_buffers;  // by sender
        std::vector<Router::RoutedRequest> requests;
        std::vector<StagingBuffers::Buffer> taken;
    };
    using Own = std::map<int, const std::byte*>;  // by chunk
    // Adjacent elements that are written in one operation.
    struct Range {
        const RankProgram::Write* write;
        std::byte* out;
        std::vector<const void*> operands;
        std::size_t bytes;
    };

    void begin(const RankProgram::Step& step) {
        expect(step, now_, false);
        for (const auto& message : step.sends) {
            const std::size_t all = length(message.pieces);
            const std::byte* from = joined(message, &Chunk::contents);
            if (!from) from = pack(message);
            if (all) sent_.push_back(router_.send(message.peer, number_, from, all, timeout_, buffers_));
        }
        move_trace_step(1);
        if (begun_ < program_.steps.size()) expect(program_.steps[begun_], next_, true);
    }

    // Posts the receives of a step that are not yet posted. If `ahead` of the step, no message can be received in its
    // final place, which may still be read: so a long message waits for its step rather than being copied.
    void expect(const RankProgram::Step& step, StepReceives& receives, bool ahead) {
        mark_used(step, true);
        for (const auto& message : step.receives) {
            if (receives.receive_buffers.contains(message.peer)) continue;
            const std::size_t all = length(message.pieces);
            std::byte* place = in_place(message);
            if (place && ahead && all > kCheapToCopy) continue;
            if (!place || ahead) place = buffers_->take(all, receives.taken);
            receives.receive_buffers.emplace(message.peer, ReceiveBuffer{place, offsets(message.pieces)});
            if (all)
                receives.requests.push_back(router_.receive(message.peer, number_, place, all, timeout_, buffers_));
        }
        mark_used(step, false);
    }

    void finish(const RankProgram::Step& step) {
        sent_.insert(sent_.end(), now_.requests.begin(), now_.requests.end());
        router_.wait(sent_);
        const Own own = own_operands(step);
        write(step, own);
        sent_.clear();
        buffers_->give_back(taken_);
        buffers_->give_back(now_.taken);
        now_ = std::exchange(next_, {});
    }

    std::size_t bytes(int piece) const { return parts_[static_cast<std::size_t>(piece)].bytes; }
    std::size_t length(const RankProgram::Chunks& pieces) const {
        std::size_t total = 0;
        for (int piece : pieces) total += bytes(piece);
        return total;
    }

    std::vector<std::size_t> offsets(const RankProgram::Chunks& pieces) const {
        std::vector<std::size_t> found;
        std::size_t before = 0;
        for (int piece : pieces) {
            found.push_back(before);
            before += bytes(piece);
        }
        return found;
    }

    Chunk& chunk(int index) { return chunks_[static_cast<std::size_t>(index)]; }

    // The address of a message's chunks if they are contiguous in memory, otherwise null.
    template <typename Address>
    Address joined(const RankProgram::Message& message, Address Chunk::* address) {
        const RankProgram::Chunks& chunks = message.chunks;
        for (std::size_t each = 1; each < chunks.size(); ++each) {
            if (chunk(chunks[each]).*address != chunk(chunks[each - 1]).*address + bytes(message.pieces[each - 1]))
                return nullptr;
        }
        return chunk(chunks[0]).*address;
    }

    std::byte* pack(const RankProgram::Message& message) {
        const TraceSpan span(TraceKind::kCopy, length(message.pieces));
        std::byte* const packed = buffers_->take(length(message.pieces), taken_);
        std::byte* to = packed;
        for (std::size_t each = 0; each < message.chunks.size(); ++each) {
            const std::size_t all = bytes(message.pieces[each]);
            if (all) std::memcpy(to, chunk(message.chunks[each]).contents, all);
            to += all;
        }
        return packed;
    }

    // Marks the chunks of a step that a message must not be received into: those that the step sends, that are
    // operands, or that are written otherwise than by a copy of one chunk. Or removes the marks.
    void mark_used(const RankProgram::Step& step, bool used) {
        const auto mark = [&](int chunk) { is_used_[static_cast<std::size_t>(chunk)] = used; };
        for (const auto& message : step.sends) {
            for (const int chunk : message.chunks) mark(chunk);
        }
        for (const auto& write : step.writes) {
            if (!write.copy || write.sources.size() != 1) mark(write.into);
            for (const auto& source : write.sources) {
                if (source.peer < 0) mark(source.index);
            }
        }
    }

    // The final place of a message, if its chunks are contiguous and none is marked as used; otherwise null.
    std::byte* in_place(const RankProgram::Message& message) {
        for (const int chunk : message.chunks) {
            if (is_used_[static_cast<std::size_t>(chunk)]) return nullptr;
        }
        return joined(message, &Chunk::target);
    }

    // This rank's own chunks that are operands: copies of those that the step overwrites.
    Own own_operands(const RankProgram::Step& step) {
        Own own;
        RankProgram::Message copied{-1, {}, {}};
        std::set<int> overwritten;
        for (const auto& write : step.writes) overwritten.insert(write.into);
        for (const auto& write : step.writes) {
            for (const auto& source : write.sources) {
                if (source.peer >= 0 || !own.emplace(source.index, chunk(source.index).contents).second ||
                    !overwritten.contains(source.index))
                    continue;
                copied.chunks.push_back(source.index);
                copied.pieces.push_back(write.piece);
            }
        }
        if (copied.chunks.empty()) return own;
        const std::byte* at = pack(copied);
        for (std::size_t each = 0; each < copied.chunks.size(); ++each) {
            own[copied.chunks[each]] = at;
            at += bytes(copied.pieces[each]);
        }
        return own;
    }

    const std::byte* operand(const RankProgram::Source& source, const Own& own) const {
        if (source.peer < 0) return own.at(source.index);
        const ReceiveBuffer& buffer = now_.receive_buffers.at(source.peer);
        return buffer.place + buffer.offsets[static_cast<std::size_t>(source.index)];
    }

    // Chunks that are adjacent here and in the messages are written together: a call costs more than a small chunk.
    void write(const RankProgram::Step& step, const Own& own) {
        std::optional<Range> range;
        for (const auto& each : step.writes) {
            Chunk& into = chunk(each.into);
            Range next{&each, into.target, {}, bytes(each.piece)};
            if (next.bytes == 0) continue;
            if (!each.copy) next.operands.push_back(into.contents);
            into.contents = into.target;
            for (const auto& source : each.sources) next.operands.push_back(operand(source, own));
            if (range && follows(*range, next)) {
                range->bytes += next.bytes;
                continue;
            }
            if (range) write(*range);
            range = std::move(next);
        }
        if (range) write(*range);
    }

    static bool follows(const Range& range, const Range& next) {
        if (next.out != range.out + range.bytes || next.operands.size() != range.operands.size() ||
            next.write->copy != range.write->copy || next.write->terms != range.write->terms)
            return false;
        for (std::size_t each = 0; each < next.operands.size(); ++each) {
            if (next.operands[each] != static_cast<const std::byte*>(range.operands[each]) + range.bytes) return false;
        }
        return true;
    }

    void write(const Range& range) {
        const bool is_copy = range.operands.size() == 1;
        if (is_copy && range.operands[0] == range.out) return;
        const TraceSpan span(is_copy ? TraceKind::kCopy : TraceKind::kReduce, range.bytes);
        if (is_copy)
            std::memcpy(range.out, range.operands[0], range.bytes);
        else
            fold_terms(op_, dtype_, range.out, range.operands, range.write->terms, program_.ranks,
                       range.bytes / element_);
    }

    // Copies what the program has left in the input to the output, such as this rank's own block of an all_gather.
    void deliver() {
        for (std::size_t each = 0; each < parts_.size(); ++each) {
            const Part& part = parts_[each];
            if (!part.output || part.bytes == 0 || chunks_[each].contents == part.output) continue;
            const TraceSpan span(TraceKind::kCopy, part.bytes);
            std::memcpy(part.output, chunks_[each].contents, part.bytes);
        }
    }

    const RankProgram& program_;
    Router& router_;
    const std::uint64_t number_;
    const std::shared_ptr<StagingBuffers> buffers_;
    const DType dtype_;
    const Op op_;
    const std::size_t element_;
    const std::chrono::milliseconds timeout_;
    const std::size_t segment_;
    const std::vector<Part> parts_;  // by piece
    std::vector<bool> is_used_;      // by chunk; see mark_used()
    std::size_t begun_ = 0;
    TraceStep trace_;            // the current one
    std::vector<Chunk> chunks_;  // the pieces, then scratch
    std::vector<Router::RoutedRequest> sent_;
    StepReceives now_, next_;
    std::vector<StagingBuffers::Buffer> mine_, taken_;  // until the segment ends, and until the step does
};

}  // namespace

void execute(const RankProgram& program, Router& router, DType dtype, Op op, const ProgramBuffer& buffer, int segments,
             std::chrono::milliseconds timeout) {
    std::optional<BackgroundScope>
        sleeping;  // a rank that waits for the network leaves the core to the threads that serve it
    if (router.spans_hosts()) sleeping.emplace();
    // 1. What all segments share.
    const auto buffers = std::make_shared<StagingBuffers>(buffer.owner);
    std::vector<bool> is_written(static_cast<std::size_t>(program.chunks + program.scratch));
    for (const RankProgram::Step& step : program.steps) {
        for (const RankProgram::Write& write : step.writes) is_written[static_cast<std::size_t>(write.into)] = true;
    }
    // 2. Segments are in progress side by side, so that one adds while another waits. In a lane the oldest goes first.
    const auto all = static_cast<std::size_t>(segments);
    std::array<std::list<SegmentExecution>, kLanes> lanes;  // of each, the oldest segment first
    std::size_t begun = 0, finished = 0;
    const auto move = [&](std::list<SegmentExecution>& lane) {
        for (auto each = lane.begin(); each != lane.end();) {
            const bool goes_on = each->advance();
            each = goes_on ? std::next(each) : lane.erase(each);
            finished += !goes_on;
        }
        if (begun == all || lane.size() == Tags::kSegments / kLanes) return;
        lane.emplace_back(program, is_written, router, buffers, dtype, op, buffer, begun++, all, timeout);
        if (lane.back().advance()) return;
        lane.pop_back();  // a program without steps
        ++finished;
    };
    // 3. Until all segments are done. After an error no message may arrive in memory that the caller frees.
    try {
        while (finished < all) std::for_each(lanes.begin(), lanes.end(), move);
    } catch (...) {
        router.end();
        throw;
    }
}

}  // namespace dist_prims
