// The Work of an MPI operation.
#pragma once

#include "../../mpi/library.h"
#include "../common/work.h"

namespace dist_prims::mpi {

class MpiWork : public PrimsWork {
public:
    using PrimsWork::PrimsWork;

    void follow(std::shared_ptr<Operation> operation) { operation_ = std::move(operation); }
    // Returns false if abort() has woken the wait. The operation continues, and may be waited for again.
    bool wait(Milliseconds timeout) override {
        const auto limit = timeout == kNoTimeout ? Milliseconds::max() : timeout;
        return operation_->wait(limit, check_signals) && PrimsWork::wait(kNoTimeout);
    }
    void abort() override { operation_->wake(); }
    bool isCompleted() override { return operation_->test(); }
    int sourceRank() const override { return operation_->source(); }

private:
    std::shared_ptr<Operation> operation_;
};

}  // namespace dist_prims::mpi
