// A schedule as one rank executes it: the program that dist_prims.schedules.program computes.
//
// Every transfer of a step reads the state before the step. A step therefore sends first, receives into staging buffers
// any data that is added or that would overwrite data still to be read, and reduces when both are done. The order of
// the reductions is the order of the schedule, so the Python executor and the simulator give the same bits.
//
// Data may be cut into segments that follow each other through the steps, one step apart (pipelining): while one
// segment is on the link between hosts, another is reduced inside a host. Even and odd segments are two such pipelines,
// of which each rank moves one and then the other: otherwise a link would be idle from the time when a segment has
// arrived until the next one is sent. All ranks finish and begin the steps of segments in the same order, so no rank
// waits for a message that another has yet to begin. No rank has more segments in flight than there are tags for them
// (see tags.h).
//
// A chunk is read where the caller has it, until the program first writes it: then it lies in the caller's output, or
// in a buffer if the rank does not end with it. So nothing is copied before the first step.
//
//     segment 0    step 0            step 1            step 2
//     segment 1             step 0            step 1            step 2
//     segment 2                      step 0            step 1            step 2
//     segment 3                               step 0            step 1            step 2
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "../common/types.h"
#include "router.h"

namespace dist_prims {

struct RankProgram {
    using Chunks = std::vector<int>;
    struct Message {
        int peer;
        Chunks chunks, pieces;  // where the data lies, and which piece of the data each chunk is
    };
    struct Source {
        int peer;   // -1: this rank itself
        int index;  // of its chunk, or of the chunk in the message of the peer
    };
    struct Write {
        int into, piece;
        bool copy;  // otherwise the sources are reduced after what the chunk holds
        std::vector<Source> sources;
        std::vector<int> terms{};  // for a mean: the ranks whose data is in each operand, as fold_terms() takes them
    };
    struct Step {
        std::vector<Message> sends, receives;
        std::vector<Write> writes;
    };

    int chunks = 1;   // of the data; chunk i < chunks holds piece i
    int scratch = 0;  // chunks after those, which may hold any piece
    std::vector<Step> steps;
    int ranks = 1;
};

// The data that a program works on: one whole, which is cut evenly into the program's pieces, or several blocks, each
// of which is cut so.
struct ProgramBuffer {
    // Contiguous elements. The input is only read, and is null if this rank begins without the block; the output is
    // null if the rank need not end with it. The two may be the same memory. Other overlaps are not allowed.
    struct Block {
        const std::byte* input;
        std::byte* output;
        std::size_t count;
    };
    std::vector<Block> blocks;
    std::shared_ptr<const void> owner{};  // of the memory: see Transport

    bool is_whole() const { return blocks.size() == 1; }
    static ProgramBuffer whole(std::byte* data, std::size_t count, std::shared_ptr<const void> owner = {}) {
        return {{{data, data, count}}, std::move(owner)};
    }
};

// Runs the program, from the inputs to the outputs.
void execute(const RankProgram& program, Router& router, DType dtype, Op op, const ProgramBuffer& buffer, int segments,
             std::chrono::milliseconds timeout);

}  // namespace dist_prims
