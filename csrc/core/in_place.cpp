#include "in_place.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "streaming.h"

namespace dist_prims {
namespace {

constexpr std::size_t kBlock = 16 * 1024;     // at a time: it stays in the first-level cache
constexpr std::size_t kHeldBlock = 4 * 1024;  // with the next one, which is on its way

}  // namespace

Lent borrow(Room& room) {
    Board& board = room.board;
    if (board.loans() != board.size()) return {};
    std::vector<Loan> loans;
    for (int peer = 0; peer < board.size(); ++peer) loans.push_back(board.call(peer).loan);
    Lent lent;
    bool is_agreed = true, is_here = true;
    for (int peer = 0; peer < board.size(); ++peer) {
        const Loan& loan = loans[static_cast<std::size_t>(peer)];
        lent.memory.push_back(room.borrower.memory(room.peers.process(peer), loan));
        is_here = is_here && lent.memory.back();
        is_agreed = is_agreed && room.borrower.is_agreed(loan);
        if (is_here) lent.places.push_back(lent.memory.back()->data() + loan.offset);
    }
    if (is_agreed) return lent;
    *board.mine() = static_cast<std::byte>(is_here);
    board.phase();
    for (int peer = 0; peer < board.size(); ++peer) {
        if (*board.theirs(peer) == std::byte{0}) return {};
    }
    for (const Loan& loan : loans) room.borrower.agree(loan);
    return lent;
}

void InPlace::fold_share(std::size_t bytes, const Held& held) {
    for (const auto& [at, piece] : held.runs(share_of(rank_, places_.size(), bytes))) {
        if (!piece)
            fold_lent(at);
        else if (piece->data)
            fold_held(piece->within(at));
    }
    end_past_cache();
}

void InPlace::fold_lent(Range range) {
    for (std::size_t at = range.begin; at < range.end; at += kBlock) {
        const std::size_t bytes = std::min(kBlock, range.end - at);
        fold_block(at, bytes, places_[rank_] + at, places_[rank_] + at);
        for (std::size_t peer = 0; peer < places_.size(); ++peer) {
            if (peer != rank_) std::memcpy(places_[peer] + at, places_[rank_] + at, bytes);
        }
    }
}

// What the others lend has just been read, and is in the cache; its own place is not.
void InPlace::fold_held(const Held::Piece& piece) {
    alignas(64) std::byte block[kHeldBlock];
    fetch(piece.at.begin, piece.at.end);
    for (std::size_t at = piece.at.begin; at < piece.at.end; at += kHeldBlock) {
        const std::size_t bytes = std::min(kHeldBlock, piece.at.end - at);
        fetch(at + kHeldBlock, piece.at.end);
        scale(dtype_, block, piece.data + (at - piece.at.begin), piece.factor, bytes / size_of(dtype_));
        fold_block(at, bytes, block, block);
        for (std::size_t peer = 0; peer < places_.size(); ++peer) {
            if (peer == rank_)
                copy_past_cache(places_[peer] + at, block, bytes);
            else
                std::memcpy(places_[peer] + at, block, bytes);
        }
    }
}

// Ask for the next block of the others while this one is worked on.
void InPlace::fetch(std::size_t begin, std::size_t end) const {
    for (std::size_t at = begin; at < std::min(begin + kHeldBlock, end); at += Peers::kLine) {
        for (std::size_t peer = 0; peer < places_.size(); ++peer) {
            if (peer != rank_) __builtin_prefetch(places_[peer] + at, 1);
        }
    }
}

void InPlace::fold_block(std::size_t at, std::size_t bytes, const std::byte* mine, std::byte* out) {
    for (std::size_t peer = 0; peer < places_.size(); ++peer) each_[peer] = peer == rank_ ? mine : places_[peer] + at;
    fold_ranks(op_, dtype_, out, each_, bytes / size_of(dtype_));
}

}  // namespace dist_prims
