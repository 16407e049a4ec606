// The tags of the messages between the hosts of one group: which tags belong to users, and which to the group itself.
//
// A transport distinguishes the tags 0 to `largest`; MPI guarantees no more than 32,767. Users have the lower ones. The
// group reserves the last kReserved, divided by class, so a message never matches a receive of another class:
//
//     0 ... largest_of_users()      messages of users
//     notice, unused, diagnosis     one tag each (see remote_peers.h and timeout_diagnosis.h)
//     agreement                     one tag: each pair of leaders exchanges one message in each agreement, and both
//                                   make their agreements in the same order
//     barrier                       one tag, of monitored barriers
//     data                          kSegments tags, used in turn: one for each segment of data
//
// The segment that comes kSegments later has the same tag. A rank begins it when the earlier one is done on that rank:
// it has at most kSegments in flight (see schedule_executor.cpp), all ranks begin and finish segments in the same
// order, and the calls of a group follow each other. So each end of a message posts all messages of the earlier segment
// first. They match, because a transport delivers the messages of one sender, receiver and tag in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace dist_prims {

class Tags {
public:
    static constexpr std::uint64_t kSegments = 1020;
    // The numbers of segments are below it. On one host a number is a tag of PointToPoint, whose flags are the bits 61
    // to 63 (shm/p2p.h), and this is less than 2^60.
    static constexpr std::uint64_t kNumbers = kSegments << 50;

    explicit Tags(int largest) : first_(largest - kReserved + 1) {
        if (first_ <= 0)
            throw std::invalid_argument("the transport between hosts tells apart the tags 0 to " +
                                        std::to_string(largest) + " only; a group needs " + std::to_string(kReserved) +
                                        " of its own, and MPI guarantees 32767");
    }

    int largest_of_users() const { return first_ - 1; }
    int notice() const { return first_; }
    int unused() const { return first_ + 1; }  // of a message that no rank sends: see RemotePeers::end()
    int diagnosis() const { return first_ + 2; }
    int agreement() const { return first_ + 3; }
    int barrier() const { return first_ + 4; }
    // Whether messages with the tag may be shorter than the receives that they meet.
    bool may_be_shorter(int tag) const { return tag == agreement() || tag == diagnosis(); }
    // Whether the tag belongs to a collective, rather than to a message of a user or a monitored barrier.
    bool is_collective(int tag) const { return tag == agreement() || tag > barrier(); }
    // Whether messages with the tag report failures.
    bool is_control(int tag) const { return tag >= notice() && tag <= diagnosis(); }
    // The number of the segment after `number`. Numbers begin again after a multiple of kSegments, so that the tags
    // stay in turn.
    static std::uint64_t segment_after(std::uint64_t number) { return number + 1 == kNumbers ? 0 : number + 1; }
    // The tag of the segment with this number. All ranks number the segments alike.
    int data(std::uint64_t number) const { return first_ + kSingle + static_cast<int>(number % kSegments); }

private:
    static constexpr int kSingle = 5;  // tags of one kind of message each
    static constexpr int kReserved = kSingle + static_cast<int>(kSegments);

    int first_;  // of the reserved ones
};

}  // namespace dist_prims
