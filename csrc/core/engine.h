// What carries bytes to other hosts: a system that exists, gloo or MPI, seen through the little that we need of it.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <stdexcept>

namespace dist_prims {

class Engine {
public:
    static constexpr int kAnyone = -1;

    // The other side is gone, or time is up. Whatever else comes out of an engine, such as Ctrl-C, is not the other
    // side's doing.
    struct Broken : std::runtime_error {
        using std::runtime_error::runtime_error;
    };

    // A message under way, on one of its ends. Its memory must stay until it is done, or the engine has let go.
    class Letter {
    public:
        virtual ~Letter() = default;
        // Return when it is done; false if it was aborted, and then one may wait again. Throws Broken if the other side
        // is gone or `limit` has passed; then the engine is good for nothing: gloo closes all its connections.
        virtual bool wait(std::chrono::milliseconds limit) = 0;
        // Whether it is done, where the engine can tell without waiting.
        virtual bool is_done() = 0;
        // Make a wait return, that of another thread or the next one.
        virtual void abort() = 0;
        // Before its memory goes: an engine that has ended sees here that it is not to be written to any more.
        void let_go() noexcept {
            try {
                abort();
                is_done();
            } catch (const std::exception&) {  // as it should be
            }
        }
    };
    using Handle = std::unique_ptr<Letter>;

    virtual ~Engine() = default;
    // Messages of one sender, receiver and tag arrive in order. The lengths at both ends must be equal.
    virtual Handle send(int to, int tag, const std::byte* data, std::size_t bytes) = 0;
    virtual Handle receive(int from, int tag, std::byte* data, std::size_t bytes) = 0;
};

}  // namespace dist_prims
