// What the ranks of one host share: one piece of memory, and in it who they are, their board and their mail.
#pragma once

#include <memory>

#include "board.h"
#include "lending.h"
#include "mail.h"
#include "peers.h"

namespace dist_prims {

struct Room {
    // Some collectives post a list of lengths, or a piece for each rank, in one slot.
    static std::size_t least_slot(int size) { return 256 * (static_cast<std::size_t>(size) + 1); }

    static std::size_t bytes(int size, std::size_t slot) {
        return Peers::bytes(size) + Board::bytes(size, slot) + Mail::bytes(size);
    }

    Room(std::shared_ptr<const Mapping> memory, int rank, int size, std::size_t slot, Names names = {})
        : peers(memory, memory->data(), rank, size, std::move(names)),
          board(memory, memory->data() + Peers::bytes(size), peers, slot),
          mail(memory, memory->data() + Peers::bytes(size) + Board::bytes(size, slot), peers) {
        if (memory->size() < bytes(size, slot))
            throw std::runtime_error("the shared memory is too small for the ranks");
    }

    Peers peers;
    Board board;
    Mail mail;
    Borrower borrower;
    std::size_t one_shot = 32 << 10;  // up to so many bytes folding everything beats a second phase
};

}  // namespace dist_prims
