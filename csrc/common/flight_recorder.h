// The flight recorder: the last 1024 calls of this rank. The records of all ranks together show where each rank stood
// when a group failed.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "types.h"

namespace dist_prims {

class FlightRecorder {
public:
    enum class CallState : std::uint8_t { kScheduled, kStarted, kCompleted, kFailed };
    struct Entry {
        std::uint64_t id = 0, sequence = 0, count = 0;
        const char* title = "";
        const char* dtype = "";
        std::int64_t created = 0, started = 0, ended = 0;  // nanoseconds since 1970
        std::int64_t timeout_ms = 0;
        CallState state = CallState::kScheduled;
        bool point_to_point = false;
    };

    FlightRecorder() = default;
    explicit FlightRecorder(std::uint64_t first) : next_(first) {}  // for tests: the number of the first entry

    // Adds an entry and returns its number for start() and end(). `at_once`: the call starts now.
    std::uint64_t add(Entry entry, bool at_once);
    void start(std::uint64_t id);  // no effect if the call has started already
    void end(std::uint64_t id, bool well);

    // The entries as JSON in the format of PyTorch's flight recorder.
    std::string json(int rank, const std::string& group, const std::string& description,
                     const std::string& ranks) const;

private:
    static constexpr std::size_t kEntries = 1024;

    Entry* find(std::uint64_t id);  // null if the entry has been overwritten
    std::vector<Entry> entries() const;

    mutable std::mutex mutex_;
    std::array<Entry, kEntries> ring_;  // entry `id` at id % kEntries
    std::uint64_t next_ = 0;            // the id of the next entry
};

// Writes the record of this rank to a file. Reports a failure on stderr, because the program has another error already.
void write_flight_record(const std::string& path, int rank, const std::string& record);

}  // namespace dist_prims
