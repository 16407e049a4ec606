#include "plan.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace dist_prims {
namespace {

class Execution {
public:
    Execution(const Plan& plan, Mail& mail, Mail::Tag tag, DType dtype, Op op, std::byte* data, std::size_t count,
              std::chrono::milliseconds timeout)
        : mail_(mail),
          tag_(tag),
          dtype_(dtype),
          op_(op),
          data_(data),
          count_(count),
          chunks_(static_cast<std::size_t>(plan.chunks)),
          element_(size_of(dtype)),
          timeout_(timeout),
          scratch_(static_cast<std::size_t>(plan.scratch)) {
        for (auto& chunk : scratch_) chunk.resize((count / chunks_ + 1) * element_);
    }

    void step(const Plan::Step& step) {
        std::vector<Mail::Handle> letters;
        std::vector<std::vector<std::byte>> packed;
        std::vector<Landing> landings;
        landings.reserve(step.receives.size());
        for (const auto& message : step.receives) {
            Landing& landing = landings.emplace_back(Landing{&message, in_place(message, step), {}});
            if (!landing.place) {
                landing.scratch.resize(length(message.pieces));
                landing.place = landing.scratch.data();
            }
            letters.push_back(
                mail_.receive(message.peer, tag_, landing.place, length(message.pieces), timeout_, nullptr));
        }
        for (const auto& message : step.sends) {
            const std::byte* from = joined(message.chunks);
            if (!from) from = packed.emplace_back(pack(message)).data();
            letters.push_back(mail_.send(message.peer, tag_, from, length(message.pieces), timeout_, nullptr));
        }
        for (const auto& letter : letters) {
            mail_.wait(letter, std::chrono::milliseconds::max());
            if (letter->error) std::rethrow_exception(letter->error);
        }
        const Own own = own_operands(step);
        for (const auto& write : step.writes) this->write(write, landings, own);
    }

private:
    struct Landing {
        const Plan::Message* message;
        std::byte* place;
        std::vector<std::byte> scratch;
    };
    using Own = std::vector<std::pair<int, std::vector<std::byte>>>;

    std::size_t begin(int piece) const { return static_cast<std::size_t>(piece) * count_ / chunks_ * element_; }
    std::size_t bytes(int piece) const { return begin(piece + 1) - begin(piece); }
    std::size_t length(const Plan::Chunks& pieces) const {
        std::size_t total = 0;
        for (int piece : pieces) total += bytes(piece);
        return total;
    }

    bool is_scratch(int chunk) const { return static_cast<std::size_t>(chunk) >= chunks_; }
    std::byte* place(int chunk) {
        return is_scratch(chunk) ? scratch_[static_cast<std::size_t>(chunk) - chunks_].data() : data_ + begin(chunk);
    }

    // One place for chunks that follow each other, else none.
    std::byte* joined(const Plan::Chunks& chunks) {
        for (std::size_t each = 1; each < chunks.size(); ++each) {
            if (is_scratch(chunks[each]) || chunks[each] != chunks[each - 1] + 1) return nullptr;
        }
        return place(chunks[0]);
    }

    std::vector<std::byte> pack(const Plan::Message& message) {
        std::vector<std::byte> packed;
        for (std::size_t each = 0; each < message.chunks.size(); ++each) {
            const std::byte* from = place(message.chunks[each]);
            packed.insert(packed.end(), from, from + bytes(message.pieces[each]));
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
        return joined(message.chunks);
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

    const std::byte* operand(const Plan::Source& source, const std::vector<Landing>& landings, const Own& own) const {
        if (source.peer < 0) {
            return std::find_if(own.begin(), own.end(), [&](const auto& each) { return each.first == source.index; })
                ->second.data();
        }
        const auto& landing = *std::find_if(landings.begin(), landings.end(),
                                            [&](const Landing& each) { return each.message->peer == source.peer; });
        const auto first = landing.message->pieces.begin();
        return landing.place + length(Plan::Chunks(first, first + source.index));
    }

    void write(const Plan::Write& write, const std::vector<Landing>& landings, const Own& own) {
        std::byte* out = place(write.into);
        std::vector<const void*> operands;
        if (!write.copy) operands.push_back(out);
        for (const auto& source : write.sources) operands.push_back(operand(source, landings, own));
        if (bytes(write.piece) == 0 || (operands.size() == 1 && operands[0] == out)) return;
        fold(op_, dtype_, out, operands.data(), static_cast<int>(operands.size()), bytes(write.piece) / element_);
    }

    Mail& mail_;
    const Mail::Tag tag_;
    const DType dtype_;
    const Op op_;
    std::byte* const data_;
    const std::size_t count_, chunks_, element_;
    const std::chrono::milliseconds timeout_;
    std::vector<std::vector<std::byte>> scratch_;
};

}  // namespace

void execute(const Plan& plan, Mail& mail, Mail::Tag tag, DType dtype, Op op, std::byte* data, std::size_t count,
             std::chrono::milliseconds timeout) {
    Execution execution(plan, mail, tag, dtype, op, data, count, timeout);
    for (const auto& step : plan.steps) execution.step(step);
}

}  // namespace dist_prims
