// An operation: its MPI calls, its deadline and its state.
#pragma once

#include <atomic>
#include <memory>

#include "calls.h"
#include "group.h"
#include "mpi_state.h"

namespace dist_prims::mpi {

class MpiOperation : public Operation, public std::enable_shared_from_this<MpiOperation> {
public:
    MpiOperation(std::shared_ptr<MpiGroup> group, Options options, Done done);

    void begin(const std::function<void(Calls&)>& start, bool attended) override;
    bool test() override;
    bool wait(Milliseconds limit, const WaitHook& look) override;
    void wake() override { woken_ = true; }
    int source() const override { return source_; }
    bool is_attended() const { return attended_ > 0; }

private:
    void call(const std::function<void(Calls&)>& start);
    bool over();
    std::exception_ptr late(Milliseconds limit) const;
    std::exception_ptr named(const std::string& text, bool timeout = false) const;

    enum OperationState { kUnderWay, kEnding, kEnded };

    const std::shared_ptr<MpiGroup> group_;
    const Options options_;
    const Clock::time_point begun_ = Clock::now();
    MpiCalls calls_;
    std::atomic<OperationState> state_{kUnderWay};
    std::atomic<bool> woken_{false};
    std::atomic<int> attended_{0}, source_{-1};
    std::exception_ptr error_;
    Done done_;
};

}  // namespace dist_prims::mpi
