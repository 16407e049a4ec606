// The trace of this process: events with times, in a file that is mapped into memory. docs/design/tracing.md describes
// the file; dist_prims/tracing makes and reads it.
//
// While no trace is active, a hook costs one load and a branch. While a trace is active, an event takes a slot of 64
// bytes in the file: the thread takes the next slot by one atomic addition, fills it, and stores its kind last
// (release). A slot without a kind is unfinished. The kernel keeps the pages of the file if the process is killed, so
// only unfinished slots are lost.
//
// When the file is full, further events are counted and dropped. A mapping is never unmapped, because another thread
// may be about to write to it: when a trace ends, anonymous memory replaces the file at the same addresses. A forked
// child does the same, so it never writes to the file of its parent.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "types.h"

namespace dist_prims {

// The numbers are part of the format of the file: see dist_prims/tracing/format.py.
enum class TraceKind : std::uint8_t {
    kUnfinished = 0,
    kText = 1,
    kCollective = 2,  // a collective, on the thread that executes it
    kQueued = 3,      // from an asynchronous call to the beginning of its execution
    kStep = 4,        // a step of a schedule, from its first post to its last reduction
    kSend = 5,        // a message, from its post until this rank has seen its end
    kReceive = 6,
    kWait = 7,  // a thread is blocked
    kReduce = 8,
    kCopy = 9,
};

struct TraceEvent {
    std::int64_t begin = 0, end = 0;  // nanoseconds of the monotonic clock
    std::uint64_t bytes = 0;
    std::uint64_t sequence = 0;   // number of the collective in its group
    std::int32_t peer = -1;       // a rank of the group; of kCollective: the root
    std::int32_t step = -1;       // of the schedule, or the phase of the slot exchange
    std::uint32_t thread = 0;     // its number in the kernel
    std::uint32_t group = 0;      // number of a text; 0: no group
    std::uint32_t name = 0;       // number of a text; 0: no name
    std::uint16_t segment = 0;    // of the data
    std::uint8_t collective = 0;  // of kCollective and kQueued: the Collective
    std::uint8_t dtype = 0, op = 0;
    std::uint8_t failed = 0;
    std::uint8_t spare[5] = {};
    TraceKind kind = TraceKind::kUnfinished;
};
static_assert(sizeof(TraceEvent) == 64 && offsetof(TraceEvent, kind) == 63,
              "the layout of dist_prims/tracing/format.py");

// Where this thread is: the call, and the step within it. Events take these fields from here.
struct TraceContext {
    std::uint64_t sequence = 0;
    std::uint32_t group = 0;
    std::int32_t step = -1;
    std::uint16_t segment = 0;
    std::uint32_t thread = 0;  // its number in the kernel; 0: not known yet
};
extern thread_local constinit TraceContext trace_context;

inline std::int64_t trace_now() {
    return std::chrono::steady_clock::now().time_since_epoch().count();
}

class TraceBuffer {
public:
    // Maps a file that dist_prims/tracing has made; throws std::system_error.
    explicit TraceBuffer(const char* path);
    TraceBuffer(const TraceBuffer&) = delete;

    // Adds an event of this thread; sets TraceEvent::thread.
    void add(const TraceEvent& event);
    // The number of a name, which is written as a text at its first use.
    std::uint32_t name(const char* text);
    void add_group(std::uint32_t number, const std::string& description);
    // Replaces the file by anonymous memory, to which late events go. is_open() is false afterwards.
    void detach();
    bool is_open() const { return is_open_; }

private:
    struct Header;

    void add_text(std::uint8_t kind, std::uint32_t number, const std::string& text);
    std::byte* take();

    std::byte* memory_;
    std::size_t size_, capacity_, offset_;  // bytes of the file; slots, and the offset of the first slot
    bool is_open_ = true;                   // under the lock of the registry
    std::mutex names_guard_;
    std::unordered_map<std::string, std::uint32_t> names_;
};

extern constinit std::atomic<TraceBuffer*> active_trace;
// The active trace, or null.
inline TraceBuffer* tracing() {
    return active_trace.load(std::memory_order_acquire);
}

// Records the time from its construction to its destruction as an event of this thread.
class TraceSpan {
public:
    explicit TraceSpan(TraceKind kind, std::uint64_t bytes = 0, int peer = -1)
        : kind_(kind), peer_(peer), bytes_(bytes), begin_(tracing() ? trace_now() : 0) {}
    ~TraceSpan() {
        if (begin_) [[unlikely]]
            end();
    }
    TraceSpan(const TraceSpan&) = delete;

    void set_peer(int peer) { peer_ = peer; }

private:
    void end() const;

    const TraceKind kind_;
    int peer_;
    const std::uint64_t bytes_;
    const std::int64_t begin_;  // 0: no trace was active
};

// A message, from its post to its end. To be made when the message is posted; end() may be called on another thread.
class TraceTransfer {
public:
    TraceTransfer() : posted_(tracing() ? trace_now() : 0), context_(posted_ ? trace_context : TraceContext{}) {}
    void end(bool outgoing, int peer, std::uint64_t bytes) const {
        if (posted_) [[unlikely]]
            record(outgoing, peer, bytes);
    }

private:
    void record(bool outgoing, int peer, std::uint64_t bytes) const;

    std::int64_t posted_;
    TraceContext context_;
};

// A step of a schedule for one segment of the data. Steps of several segments are in progress at a time on one thread:
// resume() sets the context of the thread to this step again.
class TraceStep {
public:
    TraceStep() = default;
    TraceStep(std::size_t step, std::size_t segment);
    void resume() const;
    void end() const;

private:
    std::int64_t begin_ = 0;
    std::size_t step_ = 0, segment_ = 0;
};

// Adds `by` to the step of this thread's context.
inline void move_trace_step(int by) {
    if (tracing()) [[unlikely]]
        trace_context.step += by;
}

// The number of the next group after `last`: not 0, and none that is in use. Numbers begin again at 1 after 2^32 - 1
// groups of a process.
std::uint32_t next_trace_group(std::uint32_t last, const std::map<std::uint32_t, std::string>& in_use);

// The description of a group in traces, for as long as the group exists.
class TraceGroup {
public:
    explicit TraceGroup(const std::string& description);
    ~TraceGroup();
    TraceGroup(const TraceGroup&) = delete;

    std::uint32_t number() const { return number_; }

private:
    const std::uint32_t number_;
    const int owner_;  // the process
};

// Sets the context of this thread to a call of a group, and records it as an event if it is a collective.
class TraceCall {
public:
    TraceCall(const TraceGroup& group, const Call& call) : is_active_(tracing() != nullptr) {
        if (is_active_) [[unlikely]]
            begin(group, &call, call.sequence);
    }
    // A message of the user.
    TraceCall(const TraceGroup& group, std::uint64_t sequence) : is_active_(tracing() != nullptr) {
        if (is_active_) [[unlikely]]
            begin(group, nullptr, sequence);
    }
    ~TraceCall() {
        if (is_active_) [[unlikely]]
            end();
    }
    TraceCall(const TraceCall&) = delete;

private:
    void begin(const TraceGroup& group, const Call* call, std::uint64_t sequence);
    void end() const;

    const bool is_active_;  // the other members are set only if it is true
    int exceptions_;        // std::uncaught_exceptions() at the construction: with more at its end the call has failed
    const Call* call_;      // null: a message
    std::int64_t begin_;
    TraceContext outer_;  // restored at the end
};

// Records the time that an asynchronous call has spent in the queue, since the time `called` (0: no trace was active).
void trace_queued(const TraceGroup& group, const Call& call, std::int64_t called);

}  // namespace dist_prims

// For dist_prims/tracing, which calls these functions by ctypes. open() maps a file and returns its number, or -1 and
// an errno in `error`. select() makes the file of a number the active trace; 0: none. close() ends a trace, which must
// not be the active one.
extern "C" {
int dist_prims_trace_open(const char* path, int* error);
void dist_prims_trace_select(int number);
void dist_prims_trace_close(int number);
}
