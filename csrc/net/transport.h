// The interface of what carries bytes between hosts, which RemotePeers calls: TCP (see ../tcp), UCX or MPI.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/claim.h"

namespace dist_prims {

class Transport {
public:
    static constexpr int kAnyone = -1;

    // The other side is gone or the time limit has passed. Other exceptions of a transport, such as a
    // KeyboardInterrupt, are not caused by the other side.
    struct TransportError : std::runtime_error {
        using std::runtime_error::runtime_error;
    };

    // No network that the transport uses leads to the other side, whose process may be alive.
    struct UnreachableError : TransportError {
        using TransportError::TransportError;
    };

    // This rank has no file descriptor left for a connection, or no port.
    struct ExhaustedError : TransportError {
        using TransportError::TransportError;
    };

    // The message has another length than its receive. The transport remains usable.
    struct LengthError : TransportError {
        using TransportError::TransportError;
    };

    // A send or a receive. Its memory must stay valid until the request is done or destroyed. A transport that still
    // needs the memory after that keeps `owner`, which was passed with it.
    class TransportRequest {
    public:
        virtual ~TransportRequest() = default;
        // Returns true when the request is done, and false if it was aborted; then the caller may wait again. Throws
        // TransportError if the other side is gone or `limit` has passed. The transport is unusable afterwards.
        virtual bool wait(std::chrono::milliseconds limit) = 0;
        // Whether wait() would return or throw at once.
        virtual bool is_done() = 0;
        // Makes a wait return: the current one of another thread, or the next one.
        virtual void abort() = 0;
        // The sender of the message that has met a receive from any rank; kAnyone before that.
        virtual int source() { return kAnyone; }
    };
    using Handle = std::unique_ptr<TransportRequest>;
    using Owner = std::shared_ptr<const void>;

    virtual ~Transport() = default;
    // The largest tag. Tags begin at 0.
    virtual int largest_tag() const = 0;
    // Messages with the same sender, receiver and tag arrive in order. The lengths at both ends must be equal; some
    // messages may be shorter than the receives that they meet (see tags.h).
    virtual Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner = nullptr) = 0;
    virtual Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner = nullptr) = 0;
    // Whether there is receive_from_any(). A transport without it carries all messages of users, also within a host.
    virtual bool has_claims() const { return true; }
    // A receive from any rank, which the caller also posts in shared memory. Both have this claim: see
    // ../common/claim.h.
    virtual Handle receive_from_any(int /*tag*/, std::byte* /*data*/, std::size_t /*bytes*/, Owner, const ClaimPtr&) {
        throw std::logic_error("this transport has no receives with a claim");
    }
    // A rank whose connection to this one has ended although the rank has not left the group. It has died or, if its
    // host does not answer, cannot be reached. kAnyone: there is no such rank, or the transport cannot tell.
    struct FailedPeer {
        int rank = kAnyone;
        bool is_unreachable = false;
    };
    virtual FailedPeer failed_peer() { return {}; }
    // The ranks whose hosts have not answered bytes that this rank has sent several times. The host of a rank that does
    // not read still answers, so such a rank is not listed.
    virtual std::vector<int> unanswering() { return {}; }
    // What the connection to a rank has delivered so far: the bytes of which its kernel has acknowledged the receipt,
    // and the time in which there were bytes to deliver, and room for them at the rank.
    struct Delivered {
        std::uint64_t bytes = 0;
        std::chrono::microseconds time{0};
    };
    // By rank; empty where the transport cannot tell.
    virtual std::map<int, Delivered> delivered() { return {}; }
    // Why this rank could not open a connection for a message, or has been unable to accept connections for a while;
    // empty if neither holds. `now`: also if this rank is unable to accept connections only at the moment.
    virtual std::string refusal(bool /*now*/) { return ""; }
    // This rank is about to leave the group, and sends no more than notices. Called once.
    virtual void leave() {}
    // Moves messages as far as possible without waiting, for a thread that waits for none of them.
    virtual void progress() {}
    // The calling thread is about to wait for something else. A transport that makes progress only in threads that wait
    // for its messages lets its own thread move them meanwhile.
    virtual void move_in_background() {}
};

}  // namespace dist_prims
