// Messages to any rank of a group: through the mail to those of this host, through the engine to the others.
#pragma once

#include <vector>

#include "far.h"
#include "mail.h"

namespace dist_prims {

class Route {
public:
    struct Letter {
        Mail::Handle near;
        Far::Handle far;
    };

    // `seats`: of each rank of the group, its rank on this host, -1 for those of other hosts; empty: all are here.
    Route(Mail& mail, std::vector<int> seats, Far* far) : mail_(mail), seats_(std::move(seats)), far_(far) {}

    // A number for messages that belong together: all ranks count alike. The even ones are for meetings (span.h).
    std::uint64_t next() { return 2 * next_++ + 1; }

    Letter send(int to, std::uint64_t number, const std::byte* data, std::size_t bytes,
                std::chrono::milliseconds timeout);
    Letter receive(int from, std::uint64_t number, std::byte* data, std::size_t bytes,
                   std::chrono::milliseconds timeout);
    // Those of this host come first: they move while we wait for them; the engine moves the others by itself.
    void wait(const std::vector<Letter>& letters);

    bool spans_hosts() const { return far_ != nullptr; }

    // After an error: no message may touch its memory any more.
    void end() {
        if (far_) far_->end();
    }

private:
    int seat(int rank) const { return seats_.empty() ? rank : seats_[static_cast<std::size_t>(rank)]; }

    Mail& mail_;
    const std::vector<int> seats_;
    Far* const far_;
    std::uint64_t next_ = 0;
};

}  // namespace dist_prims
