// A schedule as one rank executes it: the program that dist_prims.schedules.program makes, in numbers.
//
// Every transfer of a step reads the state before the step. So a step sends first, receives beside the data what is to
// be added or would spoil what is still read, and folds when both are done: in the order that the program gives, which
// is the order of the schedule, so the bits are those of the Python executor and of the simulator.
//
// Data may be cut into segments that follow each other through the steps, one step apart: while one segment is on the
// link between hosts, another is reduced inside. All ranks finish and begin the steps of segments in one order, so that
// none waits for a message that another has yet to begin.
//
//     segment 0    step 0   step 1   step 2
//     segment 1             step 0   step 1   step 2
#pragma once

#include <cstddef>
#include <vector>

#include "route.h"
#include "types.h"

namespace dist_prims {

struct Plan {
    using Chunks = std::vector<int>;
    struct Message {
        int peer;
        Chunks chunks, pieces;  // where it lies, and which piece of the data each is
    };
    struct Source {
        int peer;   // -1: this rank itself
        int index;  // of its chunk, or of the chunk in the message of the peer
    };
    struct Write {
        int into, piece;
        bool copy;  // or else fold after what the chunk holds
        std::vector<Source> sources;
    };
    struct Step {
        std::vector<Message> sends, receives;
        std::vector<Write> writes;
    };

    int chunks = 1;   // of the data; chunk i < chunks holds piece i
    int scratch = 0;  // chunks after those, which may hold any piece
    std::vector<Step> steps;
};

// What a plan works on: elements in one place, cut evenly into its pieces, or into blocks for the ranks that are.
struct Field {
    std::byte* data;
    std::size_t count;
    std::vector<std::size_t> blocks{};  // elements of each; empty: the data is no list of blocks
};

// Run the plan on data that lies in one place, and leave the result there.
void execute(const Plan& plan, Route& route, DType dtype, Op op, const Field& field, int segments,
             std::chrono::milliseconds timeout);

}  // namespace dist_prims
