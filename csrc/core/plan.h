// A schedule as one rank executes it: the program that dist_prims.schedules.program makes, in numbers.
//
// Every transfer of a step reads the state before the step. So a step sends first, receives beside the data what is to
// be added or would spoil what is still read, and folds when both are done: in the order that the program gives, which
// is the order of the schedule, so the bits are those of the Python executor and of the simulator.
#pragma once

#include <cstddef>
#include <vector>

#include "mail.h"
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

// Run the plan of an all_reduce on `data`, in place; `tag` is of this call alone.
void execute(const Plan& plan, Mail& mail, Mail::Tag tag, DType dtype, Op op, std::byte* data, std::size_t count,
             std::chrono::milliseconds timeout);

}  // namespace dist_prims
