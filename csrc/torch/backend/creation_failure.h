// The first failure of a rank while a group is made.
//
// The first rank that fails writes its reason to the store of the group. The other ranks read the store at intervals
// while they wait. So no rank waits until its timeout for a rank that will not come, and all ranks on all hosts raise
// the same reason.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../shm/membership.h"

namespace dist_prims {

class CreationFailure {
public:
    // `store` must belong to one attempt to make one group: it may not hold the reason of another attempt.
    CreationFailure(c10::intrusive_ptr<c10d::Store> store, int rank) : store_(std::move(store)), rank_(rank) {}

    // Called at intervals by a rank that waits for others: handles Ctrl-C, and throws if another rank has failed.
    void check() const;

    // Called in place of a `throw` when this rank has failed with `error`. Writes the reason for the other ranks, and
    // throws `error`, or the reason of another rank if that rank has failed first.
    [[noreturn]] void report(std::exception_ptr error) const;

private:
    std::optional<CommError> read_reason() const;
    std::optional<CommError> await_reason() const;
    void write_reason(CommError::Kind kind, const std::string& text) const;
    std::string rank_prefix() const;

    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_;
};

}  // namespace dist_prims
