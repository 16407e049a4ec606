#include "plan.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <utility>

#include "kernels.h"

namespace dist_prims {
namespace {

constexpr std::size_t kCheapToCopy = 64 << 10;

// Memory for what is on its way, kept for the next step.
class Buffers {
public:
    struct Buffer {
        std::unique_ptr<std::byte[]> data;
        std::size_t bytes;
    };

    // It stays until the step gives all back.
    std::byte* take(std::size_t bytes, std::vector<Buffer>& taken) {
        auto found = std::find_if(free_.begin(), free_.end(), [&](const Buffer& each) { return each.bytes >= bytes; });
        if (found == free_.end()) {
            taken.push_back({std::make_unique_for_overwrite<std::byte[]>(bytes), bytes});
        } else {
            taken.push_back(std::move(*found));
            free_.erase(found);
        }
        return taken.back().data.get();
    }
    void give_back(std::vector<Buffer>& taken) {
        for (Buffer& each : taken) free_.push_back(std::move(each));
        taken.clear();
    }

private:
    std::list<Buffer> free_;
};

// A segment of a piece of the data.
struct Part {
    std::byte* place;
    std::size_t bytes;
};

// The pieces of one segment. Data that is one whole is cut into segments first, so that the pieces of a segment lie
// side by side; blocks of ranks stay what they are.
std::vector<Part> parts(const Plan& plan, const Field& field, std::size_t element, std::size_t segment,
                        std::size_t segments) {
    std::vector<Part> found;
    const auto add = [&](std::size_t begin, std::size_t end) {
        found.push_back({field.data + begin * element, (end - begin) * element});
    };
    const auto pieces = static_cast<std::size_t>(plan.chunks);
    if (field.blocks.empty()) {
        const std::size_t begin = segment * field.count / segments,
                          all = (segment + 1) * field.count / segments - begin;
        for (std::size_t piece = 0; piece < pieces; ++piece)
            add(begin + piece * all / pieces, begin + (piece + 1) * all / pieces);
        return found;
    }
    const std::size_t each = pieces / field.blocks.size();  // pieces of a block
    std::size_t begin = 0;
    for (const std::size_t block : field.blocks) {
        for (std::size_t piece = 0; piece < each; ++piece) {
            const std::size_t first = piece * block / each, all = (piece + 1) * block / each - first;
            add(begin + first + segment * all / segments, begin + first + (segment + 1) * all / segments);
        }
        begin += block;
    }
    return found;
}

// One segment on its way through the steps.
class Execution {
public:
    Execution(const Plan& plan, Route& route, Buffers& buffers, DType dtype, Op op, const Field& field,
              std::size_t segment, std::size_t segments, std::chrono::milliseconds timeout)
        : plan_(plan),
          route_(route),
          number_(route.next()),
          buffers_(buffers),
          dtype_(dtype),
          op_(op),
          element_(size_of(dtype)),
          timeout_(timeout),
          parts_(parts(plan, field, element_, segment, segments)) {
        std::size_t longest = 0;
        for (const Part& part : parts_) longest = std::max(longest, part.bytes);
        for (int chunk = 0; chunk < plan.scratch; ++chunk) scratch_.push_back(buffers.take(longest, mine_));
    }

    // Finish the step that is under way, and begin the next; false when there is none.
    bool advance() {
        if (begun_ > 0) finish(plan_.steps[begun_ - 1]);
        if (begun_ == plan_.steps.size()) {
            buffers_.give_back(mine_);
            return false;
        }
        begin(plan_.steps[begun_++]);
        return true;
    }

private:
    struct Landing {
        const Plan::Message* message;
        std::byte* place;
    };
    // What a step receives.
    struct Arrivals {
        std::vector<Landing> landings;
        std::vector<Route::Letter> letters;
        std::vector<Buffers::Buffer> taken;
    };
    using Own = std::vector<std::pair<int, const std::byte*>>;

    void begin(const Plan::Step& step) {
        expect(step, now_, false);
        for (const auto& message : step.sends) {
            const std::size_t all = length(message.pieces);
            const std::byte* from = joined(message.chunks, message.pieces);
            if (!from) from = pack(message);
            if (all) sent_.push_back(route_.send(message.peer, number_, from, all, timeout_));
        }
        if (begun_ < plan_.steps.size()) expect(plan_.steps[begun_], next_, true);
    }

    // Ask for the messages of a step that have not been asked for. Ahead of it, none can land in its place, which may
    // still be read: so a long one waits rather than being copied.
    void expect(const Plan::Step& step, Arrivals& arrivals, bool ahead) {
        for (const auto& message : step.receives) {
            const auto is_same = [&](const Landing& each) { return each.message == &message; };
            if (std::any_of(arrivals.landings.begin(), arrivals.landings.end(), is_same)) continue;
            const std::size_t all = length(message.pieces);
            std::byte* place = in_place(message, step);
            if (place && ahead && all > kCheapToCopy) continue;
            if (!place || ahead) place = buffers_.take(all, arrivals.taken);
            arrivals.landings.push_back({&message, place});
            if (all) arrivals.letters.push_back(route_.receive(message.peer, number_, place, all, timeout_));
        }
    }

    void finish(const Plan::Step& step) {
        sent_.insert(sent_.end(), now_.letters.begin(), now_.letters.end());
        route_.wait(sent_);
        const Own own = own_operands(step);
        for (const auto& write : step.writes) this->write(write, own);
        sent_.clear();
        buffers_.give_back(taken_);
        buffers_.give_back(now_.taken);
        now_ = std::exchange(next_, {});
    }

    std::size_t bytes(int piece) const { return parts_[static_cast<std::size_t>(piece)].bytes; }
    std::size_t length(const Plan::Chunks& pieces) const {
        std::size_t total = 0;
        for (int piece : pieces) total += bytes(piece);
        return total;
    }

    std::byte* place(int chunk) {
        return chunk >= plan_.chunks ? scratch_[static_cast<std::size_t>(chunk - plan_.chunks)]
                                     : parts_[static_cast<std::size_t>(chunk)].place;
    }

    // One place for chunks that follow each other in memory, else none.
    std::byte* joined(const Plan::Chunks& chunks, const Plan::Chunks& pieces) {
        for (std::size_t each = 1; each < chunks.size(); ++each) {
            if (place(chunks[each]) != place(chunks[each - 1]) + bytes(pieces[each - 1])) return nullptr;
        }
        return place(chunks[0]);
    }

    std::byte* pack(const Plan::Message& message) {
        std::byte* const packed = buffers_.take(length(message.pieces), taken_);
        std::byte* to = packed;
        for (std::size_t each = 0; each < message.chunks.size(); ++each) {
            const std::size_t all = bytes(message.pieces[each]);
            if (all) std::memcpy(to, place(message.chunks[each]), all);
            to += all;
        }
        return packed;
    }

    // The place of a message that only replaces chunks which nothing else in the step reads or writes.
    std::byte* in_place(const Plan::Message& message, const Plan::Step& step) {
        const auto has = [&](int chunk) {
            return std::find(message.chunks.begin(), message.chunks.end(), chunk) != message.chunks.end();
        };
        for (const auto& sent : step.sends) {
            if (std::any_of(sent.chunks.begin(), sent.chunks.end(), has)) return nullptr;
        }
        for (const auto& write : step.writes) {
            if (has(write.into) && !(write.copy && write.sources.size() == 1)) return nullptr;
            for (const auto& source : write.sources) {
                if (source.peer < 0 && has(source.index)) return nullptr;
            }
        }
        return joined(message.chunks, message.pieces);
    }

    // Copies of this rank's own chunks that are operands: a write of this step may come first.
    Own own_operands(const Plan::Step& step) {
        Own own;
        for (const auto& write : step.writes) {
            for (const auto& source : write.sources) {
                if (source.peer < 0) own.emplace_back(source.index, pack({-1, {source.index}, {write.piece}}));
            }
        }
        return own;
    }

    const std::byte* operand(const Plan::Source& source, const Own& own) const {
        if (source.peer < 0) {
            return std::find_if(own.begin(), own.end(), [&](const auto& each) { return each.first == source.index; })
                ->second;
        }
        const auto& landing = *std::find_if(now_.landings.begin(), now_.landings.end(),
                                            [&](const Landing& each) { return each.message->peer == source.peer; });
        const auto first = landing.message->pieces.begin();
        return landing.place + length(Plan::Chunks(first, first + source.index));
    }

    void write(const Plan::Write& write, const Own& own) {
        std::byte* out = place(write.into);
        std::vector<const void*> operands;
        if (!write.copy) operands.push_back(out);
        for (const auto& source : write.sources) operands.push_back(operand(source, own));
        const std::size_t all = bytes(write.piece);
        if (all == 0 || (operands.size() == 1 && operands[0] == out)) return;
        if (operands.size() == 1)
            std::memcpy(out, operands[0], all);
        else
            fold(op_, dtype_, out, operands.data(), static_cast<int>(operands.size()), all / element_);
    }

    const Plan& plan_;
    Route& route_;
    const std::uint64_t number_;
    Buffers& buffers_;
    const DType dtype_;
    const Op op_;
    const std::size_t element_;
    const std::chrono::milliseconds timeout_;
    const std::vector<Part> parts_;  // by piece
    std::size_t begun_ = 0;
    std::vector<std::byte*> scratch_;
    std::vector<Route::Letter> sent_;
    Arrivals now_, next_;
    std::vector<Buffers::Buffer> mine_, taken_;  // until the segment ends, and until the step does
};

}  // namespace

void execute(const Plan& plan, Route& route, DType dtype, Op op, const Field& field, int segments,
             std::chrono::milliseconds timeout) {
    std::optional<InBackground> sleeping;  // who waits for the network leaves the core to those who work for it
    if (route.spans_hosts()) sleeping.emplace();
    Buffers buffers;
    std::list<Execution> under_way;  // the oldest first
    try {
        for (int begun = 0; begun < segments || !under_way.empty();) {
            for (auto each = under_way.begin(); each != under_way.end();)
                each = each->advance() ? std::next(each) : under_way.erase(each);
            if (begun == segments) continue;
            const auto segment = static_cast<std::size_t>(begun++), all = static_cast<std::size_t>(segments);
            under_way.emplace_back(plan, route, buffers, dtype, op, field, segment, all, timeout);
            if (!under_way.back().advance()) under_way.pop_back();
        }
    } catch (...) {
        route.end();
        throw;
    }
}

}  // namespace dist_prims
