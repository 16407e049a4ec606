// execute(), at the end, makes a SegmentExecution for each segment and advances these from step to step. A step has two
// halves, with the steps of other segments between them: begin_step() posts messages, finish_step() waits and reduces.
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

constexpr std::size_t kCheapToCopy = 64 << 10;  // bytes
constexpr std::size_t kPipelines = 2;

// Staging buffers of one collective, reused from step to step. Each request to another host owns this object and,
// through it, the caller's data: a transport that still needs the memory of a failed request keeps it from being freed.
class StagingBuffers {
public:
    struct Buffer {
        std::byte* data;
        std::size_t bytes;
    };

    explicit StagingBuffers(std::shared_ptr<const void> data) : data_(std::move(data)) {}

    // Returns a buffer, and adds it to `taken`. It is in use until give_back().
    std::byte* take(std::size_t bytes, std::vector<Buffer>& taken) {
        const auto fit =
            std::find_if(free_.begin(), free_.end(), [&](const Buffer& free) { return free.bytes >= bytes; });
        if (fit == free_.end()) {
            all_.push_back(KeptMemory::take(bytes));
            taken.push_back({all_.back().data(), all_.back().bytes()});
        } else {
            taken.push_back(*fit);
            free_.erase(fit);
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

// The part of one piece that belongs to one segment. Input and output: see ProgramBuffer::Block.
struct Part {
    const std::byte* input;
    std::byte* output;
    std::size_t bytes;
};

// The parts of a segment, by piece. Data that is one whole is cut into segments and each segment into pieces, so that
// the pieces of a segment are contiguous. A block of several is cut into pieces, and each piece into segments.
std::vector<Part> parts_of(std::size_t segment, std::size_t segments, const RankProgram& program,
                           const ProgramBuffer& buffer, std::size_t element) {
    std::vector<Part> parts;
    const auto add = [&](const ProgramBuffer::Block& block, std::size_t begin, std::size_t end) {
        const auto at = [&](auto* memory) { return memory ? memory + begin * element : nullptr; };
        parts.push_back({at(block.input), at(block.output), (end - begin) * element});
    };
    const std::size_t pieces = static_cast<std::size_t>(program.chunks) / buffer.blocks.size();  // of a block
    for (const ProgramBuffer::Block& block : buffer.blocks) {
        if (buffer.is_whole()) {
            const std::size_t begin = segment * block.count / segments,
                              count = (segment + 1) * block.count / segments - begin;
            for (std::size_t piece = 0; piece < pieces; ++piece)
                add(block, begin + piece * count / pieces, begin + (piece + 1) * count / pieces);
            continue;
        }
        for (std::size_t piece = 0; piece < pieces; ++piece) {
            const std::size_t begin = piece * block.count / pieces, count = (piece + 1) * block.count / pieces - begin;
            add(block, begin + segment * count / segments, begin + (segment + 1) * count / segments);
        }
    }
    return parts;
}

// The execution of the program on one segment.
class SegmentExecution {
public:
    // `is_written`: by chunk, whether the program writes it. A chunk that it only reads stays in the input.
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
          parts_(parts_of(segment, segments, program, buffer, element_)),
          must_keep_(static_cast<std::size_t>(program.chunks + program.scratch)) {
        // 1. One buffer for all chunks that are written but have no output.
        const auto needs_memory = [&](std::size_t piece) { return !parts_[piece].output && is_written[piece]; };
        std::size_t longest = 0, without_output = 0;
        for (std::size_t piece = 0; piece < parts_.size(); ++piece) {
            longest = std::max(longest, parts_[piece].bytes);
            if (needs_memory(piece)) without_output += parts_[piece].bytes;
        }
        std::byte* memory = without_output ? buffers_->take(without_output, segment_buffers_) : nullptr;
        // 2. The chunks of the data; chunk i holds piece i at first.
        for (std::size_t piece = 0; piece < parts_.size(); ++piece) {
            const Part& part = parts_[piece];
            std::byte* const target = needs_memory(piece) ? std::exchange(memory, memory + part.bytes) : part.output;
            chunks_.push_back({part.input ? part.input : target, target});
        }
        // 3. The scratch chunks, each of which may hold any piece.
        for (int chunk = 0; chunk < program.scratch; ++chunk) {
            std::byte* const target = buffers_->take(longest, segment_buffers_);
            chunks_.push_back({target, target});
        }
    }

    // Finishes the current step and begins the next; returns false after the last.
    bool advance() {
        if (begun_steps_ > 0) {
            trace_.resume();
            finish_step(program_.steps[begun_steps_ - 1]);
            trace_.end();
        }
        if (begun_steps_ == program_.steps.size()) {
            deliver();
            buffers_->give_back(segment_buffers_);
            return false;
        }
        trace_ = TraceStep(begun_steps_, segment_);
        begin_step(program_.steps[begun_steps_++]);
        return true;
    }

private:
    // Where the contents of a chunk are, and where the program writes them.
    struct Chunk {
        const std::byte* contents;
        std::byte* target;
    };
    // Where a message is received, and the offset of each of its chunks in bytes.
    struct ReceiveBuffer {
        std::byte* memory;
        std::vector<std::size_t> offsets;
    };
    // The posted receives of one step.
    struct StepReceives {
        std::map<int, ReceiveBuffer> receive_buffers;  // by sender
        std::vector<Router::RoutedRequest> requests;
        std::vector<StagingBuffers::Buffer> taken;
    };
    using OwnOperands = std::map<int, const std::byte*>;  // by chunk of this rank
    // Contiguous elements that are written in one operation; `write` is the first of the writes to which they belong.
    struct WriteRange {
        const RankProgram::Write* write;
        std::byte* out;
        std::vector<const void*> operands;
        std::size_t bytes;
    };

    void begin_step(const RankProgram::Step& step) {
        // 1. Receives come first, so that no message of another rank waits for this rank to pack its own.
        post_receives(step, current_receives_, false);
        // 2. Send from where the chunks are or, if they are not contiguous, from a packed copy.
        for (const auto& message : step.sends) {
            const std::size_t bytes = length(message.pieces);
            const std::byte* from = contiguous_address(message, &Chunk::contents);
            if (!from) from = pack(message);
            if (bytes) step_requests_.push_back(router_.send(message.peer, number_, from, bytes, timeout_, buffers_));
        }
        // 3. Post receives of the next step, while the messages of this one are in flight.
        move_trace_step(1);
        if (begun_steps_ < program_.steps.size()) post_receives(program_.steps[begun_steps_], next_receives_, true);
    }

    // Posts the receives of a step that are not posted yet. `ahead`: this is done one step earlier, so that messages do
    // not wait for their receives. The final place of a message may still be read then, so a short message is received
    // into a buffer, and a long one is left to its step, because a copy of it would take longer than it saves.
    void post_receives(const RankProgram::Step& step, StepReceives& receives, bool ahead) {
        mark_kept(step, true);
        for (const auto& message : step.receives) {
            if (receives.receive_buffers.contains(message.peer)) continue;
            const std::size_t bytes = length(message.pieces);
            std::byte* memory = final_place(message);
            if (memory && ahead && bytes > kCheapToCopy) continue;
            if (!memory || ahead) memory = buffers_->take(bytes, receives.taken);
            receives.receive_buffers.emplace(message.peer, ReceiveBuffer{memory, offsets(message.pieces)});
            if (bytes)
                receives.requests.push_back(router_.receive(message.peer, number_, memory, bytes, timeout_, buffers_));
        }
        mark_kept(step, false);
    }

    // Waits for the messages of the step, and writes its results.
    void finish_step(const RankProgram::Step& step) {
        step_requests_.insert(step_requests_.end(), current_receives_.requests.begin(),
                              current_receives_.requests.end());
        router_.wait(step_requests_);
        const OwnOperands own = keep_own_operands(step);  // before the first write
        write(step, own);
        step_requests_.clear();
        buffers_->give_back(step_buffers_);
        buffers_->give_back(current_receives_.taken);
        current_receives_ = std::exchange(next_receives_, {});
    }

    std::size_t bytes(int piece) const { return parts_[static_cast<std::size_t>(piece)].bytes; }
    std::size_t length(const RankProgram::Chunks& pieces) const {
        std::size_t total = 0;
        for (const int piece : pieces) total += bytes(piece);
        return total;
    }

    std::vector<std::size_t> offsets(const RankProgram::Chunks& pieces) const {
        std::vector<std::size_t> offsets;
        std::size_t before = 0;
        for (const int piece : pieces) {
            offsets.push_back(before);
            before += bytes(piece);
        }
        return offsets;
    }

    Chunk& chunk(int index) { return chunks_[static_cast<std::size_t>(index)]; }

    // The address of a message's chunks, by this member of Chunk, if they are contiguous in memory; otherwise null.
    template <typename Address>
    Address contiguous_address(const RankProgram::Message& message, Address Chunk::* address) {
        const RankProgram::Chunks& chunks = message.chunks;
        for (std::size_t index = 1; index < chunks.size(); ++index) {
            if (chunk(chunks[index]).*address != chunk(chunks[index - 1]).*address + bytes(message.pieces[index - 1]))
                return nullptr;
        }
        return chunk(chunks[0]).*address;
    }

    // Copies the chunks of a message into a buffer, which is in use until the step ends.
    std::byte* pack(const RankProgram::Message& message) {
        const TraceSpan span(TraceKind::kCopy, length(message.pieces));
        std::byte* const packed = buffers_->take(length(message.pieces), step_buffers_);
        std::byte* to = packed;
        for (std::size_t index = 0; index < message.chunks.size(); ++index) {
            const std::size_t count = bytes(message.pieces[index]);
            if (count) std::memcpy(to, chunk(message.chunks[index]).contents, count);
            to += count;
        }
        return packed;
    }

    // Marks the chunks into which a step must not receive a message, because it still needs their contents: it sends
    // them, they are operands, or they are written otherwise than by a copy of one source. `keep` false: removes these
    // marks.
    void mark_kept(const RankProgram::Step& step, bool keep) {
        const auto mark = [&](int chunk) { must_keep_[static_cast<std::size_t>(chunk)] = keep; };
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

    // The final place of a message, if its chunks are contiguous and none of them must be kept; otherwise null.
    std::byte* final_place(const RankProgram::Message& message) {
        for (const int chunk : message.chunks) {
            if (must_keep_[static_cast<std::size_t>(chunk)]) return nullptr;
        }
        return contiguous_address(message, &Chunk::target);
    }

    // Where this rank's own chunks that are operands of the step lie. A chunk that the step also overwrites is copied.
    OwnOperands keep_own_operands(const RankProgram::Step& step) {
        // 1. Find the operands, and list those that are overwritten as if they were one message.
        OwnOperands own;
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
        // 2. Copy them into one buffer.
        const std::byte* at = pack(copied);
        for (std::size_t index = 0; index < copied.chunks.size(); ++index) {
            own[copied.chunks[index]] = at;
            at += bytes(copied.pieces[index]);
        }
        return own;
    }

    const std::byte* operand(const RankProgram::Source& source, const OwnOperands& own) const {
        if (source.peer < 0) return own.at(source.index);
        const ReceiveBuffer& buffer = current_receives_.receive_buffers.at(source.peer);
        return buffer.memory + buffer.offsets[static_cast<std::size_t>(source.index)];
    }

    // Does the writes of a step. Chunks whose targets and operands are contiguous are written in one call of a kernel.
    void write(const RankProgram::Step& step, const OwnOperands& own) {
        std::optional<WriteRange> range;
        for (const auto& write : step.writes) {
            Chunk& into = chunk(write.into);
            WriteRange next{&write, into.target, {}, bytes(write.piece)};
            if (next.bytes == 0) continue;
            if (!write.copy) next.operands.push_back(into.contents);
            into.contents = into.target;
            for (const auto& source : write.sources) next.operands.push_back(operand(source, own));
            if (range && follows(*range, next)) {
                range->bytes += next.bytes;
                continue;
            }
            if (range) write_range(*range);
            range = std::move(next);
        }
        if (range) write_range(*range);
    }

    // Whether `next` can be written in one operation with `range`: it is the same operation, and its output and all its
    // operands begin where the output and the operands of `range` end.
    static bool follows(const WriteRange& range, const WriteRange& next) {
        if (next.out != range.out + range.bytes || next.operands.size() != range.operands.size() ||
            next.write->copy != range.write->copy || next.write->terms != range.write->terms)
            return false;
        for (std::size_t index = 0; index < next.operands.size(); ++index) {
            if (next.operands[index] != static_cast<const std::byte*>(range.operands[index]) + range.bytes)
                return false;
        }
        return true;
    }

    void write_range(const WriteRange& range) {
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
        for (std::size_t piece = 0; piece < parts_.size(); ++piece) {
            const Part& part = parts_[piece];
            if (!part.output || part.bytes == 0 || chunks_[piece].contents == part.output) continue;
            const TraceSpan span(TraceKind::kCopy, part.bytes);
            std::memcpy(part.output, chunks_[piece].contents, part.bytes);
        }
    }

    const RankProgram& program_;
    Router& router_;
    const std::uint64_t number_;  // of this segment, for the tags of its messages
    const std::shared_ptr<StagingBuffers> buffers_;
    const DType dtype_;
    const Op op_;
    const std::size_t element_;
    const std::chrono::milliseconds timeout_;
    const std::size_t segment_;
    const std::vector<Part> parts_;  // by piece
    std::vector<bool> must_keep_;    // by chunk; see mark_kept()
    std::size_t begun_steps_ = 0;    // the last of these is the current one
    TraceStep trace_;                // of the current step
    std::vector<Chunk> chunks_;      // the pieces, then scratch
    std::vector<Router::RoutedRequest> step_requests_;
    StepReceives current_receives_, next_receives_;
    std::vector<StagingBuffers::Buffer> segment_buffers_;  // given back when the segment ends
    std::vector<StagingBuffers::Buffer> step_buffers_;     // given back when the step ends
};

}  // namespace

void execute(const RankProgram& program, Router& router, DType dtype, Op op, const ProgramBuffer& buffer, int segments,
             std::chrono::milliseconds timeout) {
    // 1. A rank that waits for the network leaves its core to the threads that move the messages.
    std::optional<BackgroundScope> background;
    if (router.spans_hosts()) background.emplace();
    // 2. What all segments share.
    const auto buffers = std::make_shared<StagingBuffers>(buffer.owner);
    std::vector<bool> is_written(static_cast<std::size_t>(program.chunks + program.scratch));
    for (const RankProgram::Step& step : program.steps) {
        for (const RankProgram::Write& write : step.writes) is_written[static_cast<std::size_t>(write.into)] = true;
    }
    // 3. Advance a pipeline: each of its segments by one step, the oldest first, and then begin a new segment.
    const auto all = static_cast<std::size_t>(segments);
    std::array<std::list<SegmentExecution>, kPipelines> pipelines;
    std::size_t begun = 0, finished = 0;
    const auto advance = [&](std::list<SegmentExecution>& pipeline) {
        for (auto segment = pipeline.begin(); segment != pipeline.end();) {
            const bool goes_on = segment->advance();
            segment = goes_on ? std::next(segment) : pipeline.erase(segment);
            finished += !goes_on;
        }
        if (begun == all || pipeline.size() == Tags::kSegments / kPipelines) return;
        pipeline.emplace_back(program, is_written, router, buffers, dtype, op, buffer, begun++, all, timeout);
        if (pipeline.back().advance()) return;
        pipeline.pop_back();  // a program without steps
        ++finished;
    };
    // 4. Until all segments are done. After an error no message may arrive in memory that the caller frees.
    try {
        while (finished < all) std::ranges::for_each(pipelines, advance);
    } catch (...) {
        router.end();
        throw;
    }
}

}  // namespace dist_prims
