// The data of a collective that travels in the messages of the agreement on the call, from the leader of each host to
// the other leaders. MultiHostGroup calls it, in the thread that makes the call.
//
// A rank writes its inputs into its slot in shared memory, one block after the other: its row. The leader of each host
// makes a message for each host, also for its own, from the rows of its host. From the messages of all hosts the leader
// then combines the result of its host, from which each rank copies its outputs:
//
//                     row                        message to host b                        result of host b
//     all_reduce      a block                    the sum of the rows                      the sum of all
//     reduce          a block                    the same if the root is on b             the same
//     broadcast       the root: a block          the root's row                           the root's row
//     all_gather      a block                    the rows                                 the rows of all ranks
//     gather          a block                    the rows if the root is on b             the same
//     reduce_scatter  a block for each rank      the sum of each block for a rank of b    the same, summed over hosts
//     scatter         the root: the same         the blocks for the ranks of b            the same
//     all_to_all      a block for each rank      for each rank of b: the blocks for it    for each rank of b: the same
//                                                                                         from all ranks
//
// Blocks of several ranks are in the order of their ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "../common/types.h"
#include "hosts.h"
#include "schedule_executor.h"

namespace dist_prims {

class Piggyback {
public:
    // `buffer`: as a schedule has it, see ProgramBuffer. All ranks know the lengths of all blocks, or all blocks have
    // one length.
    Piggyback(const Hosts& hosts, int rank, const Call& call, const ProgramBuffer& buffer);

    // The bytes of data that a collective moves through a slot or a message, at most: `bytes` is the size of its call.
    static std::size_t most_bytes(const Hosts& hosts, Collective collective, std::size_t bytes);
    // Whether all hosts get the same message.
    static bool is_for_all(Collective collective);
    // Whether each host gets a message of its own.
    bool is_addressed() const { return shape_.addressed; }

    // The row of this rank where its inputs are, and its outputs as the memory of a result: null unless the blocks
    // follow each other in memory. If they do, the leader of a host copies no row, and a leader without other ranks on
    // its host copies no outputs.
    const std::byte* row_in_place() const;
    std::byte* result_in_place() const;
    // Writes the row of this rank.
    void write_row(std::byte* row) const;
    // Copies the outputs of this rank from the result.
    void copy_outputs(const std::byte* result) const;

    // For leaders. The bytes of the message from one host to another:
    std::size_t message_bytes(std::size_t from, std::size_t to) const;
    // Writes the message for a host, from the rows by local rank.
    void pack_message(std::size_t to, const std::vector<const std::byte*>& rows, std::byte* message) const;
    // Writes the result, from the messages by host.
    void combine(const std::vector<const std::byte*>& messages, std::byte* result) const;

private:
    // What distinguishes the collectives.
    struct Shape {
        bool reduces;
        bool addressed;  // a row has a block for each rank
        bool from_root;  // only the root has a row
        bool to_root;    // only the root has outputs
    };

    static Shape shape_of(Collective collective);

    bool is_root_on(std::size_t host) const;
    std::vector<int> sources(std::size_t host) const;
    std::vector<int> targets(std::size_t host) const;
    std::size_t block_count(int source, int target) const;  // elements
    std::size_t block_bytes(int source, int target) const { return block_count(source, target) * element_bytes_; }
    std::size_t offset_in_row(int target) const;
    std::size_t offset_in_result() const;
    std::size_t bytes_of_all_sources(int target) const;
    void combine_blocks(std::vector<const std::byte*> messages, std::byte* result) const;

    const Hosts& hosts_;
    const int rank_;
    const Call& call_;
    const ProgramBuffer& buffer_;
    const Shape shape_;
    const std::size_t element_bytes_;
};

}  // namespace dist_prims
