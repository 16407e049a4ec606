// Executes one rank's program: its part of a schedule, which dist_prims.schedules.program computes. The adapter for
// torch calls execute() for a collective with a pinned or chosen schedule, in the thread that makes the call.
//
// Every transfer of a step reads the state before the step. A step therefore sends first, receives into staging buffers
// any data that is added or that would overwrite data still to be read, and reduces when both are done. The order of
// the reductions is the order of the schedule, so the Python executor and the simulator give the same bits.
//
// The data may be cut into segments, which follow each other through the steps, one step apart:
//
//     segment 0    step 0            step 1            step 2
//     segment 1             step 0            step 1            step 2
//     segment 2                      step 0            step 1            step 2
//     segment 3                               step 0            step 1            step 2
//
// So one segment is reduced inside a host while another is on the link between hosts. Even and odd segments are two
// pipelines, which each rank advances in turn: with one pipeline the link would be idle from the arrival of a segment
// until the next one is sent. All ranks finish and begin the steps of segments in the same order, so no rank waits for
// a message that another rank sends only later. No rank has more segments in flight than there are tags (see tags.h).
//
// A chunk is read from the caller's input until the program first writes it. From then on it lies in the caller's
// output, or in a buffer if the rank need not end with it. So nothing is copied before the first step.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "../common/types.h"
#include "router.h"

namespace dist_prims {

// A piece is a part of the data; a chunk is a place that holds a piece (see docs/design/glossary.md).
struct RankProgram {
    using Chunks = std::vector<int>;
    // The data of these chunks, one after the other, to or from a peer. `pieces`: the piece that each chunk holds.
    struct Message {
        int peer;
        Chunks chunks, pieces;
    };
    // A chunk of this rank (peer -1), or the chunk at this index in the message from a peer.
    struct Source {
        int peer;
        int index;
    };
    // Writes a piece into the chunk `into`: the sources, reduced in this order if there are several. Unless `copy`,
    // what the chunk holds is the first operand.
    struct Write {
        int into, piece;
        bool copy;
        std::vector<Source> sources;
        std::vector<int> terms{};  // for a mean: how many ranks' data is in each operand, as fold_terms() takes it
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

// The data that a program works on: one block, or several. Each is cut evenly into the same number of pieces.
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

// Runs the program, from the inputs to the outputs. Throws CommError after a failure; the group has ended then.
//
// Args:
//     buffer: the inputs and outputs of this rank.
//     segments: the number of segments into which the data is cut; the same on all ranks.
//     timeout: of each message.
void execute(const RankProgram& program, Router& router, DType dtype, Op op, const ProgramBuffer& buffer, int segments,
             std::chrono::milliseconds timeout);

}  // namespace dist_prims
