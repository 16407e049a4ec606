#include "flight_recorder.h"

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>

namespace dist_prims {
namespace {

constexpr const char* kVersion = "2.4";  // of PyTorch's format for flight records
constexpr const char* kStates[] = {"scheduled", "started", "completed", "failed"};

std::int64_t now() {
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (char letter : text) {
        if (letter == '"' || letter == '\\') result += '\\';
        result += static_cast<unsigned char>(letter) < ' ' ? ' ' : letter;
    }
    return result + '"';
}

std::string time_or_null(std::int64_t time) {
    return time ? std::to_string(time) : "null";
}

std::string text_of(const FlightRecorder::Entry& entry, const std::string& group, const std::string& description) {
    const std::string sizes = entry.dtype[0] ? "[[" + std::to_string(entry.count) + "]]" : "[]";
    const std::string types = entry.dtype[0] ? std::string("[").append(quoted(entry.dtype)).append("]") : "[]";
    const std::string sequence = std::to_string(entry.sequence), none = "0";
    return "{\"frames\": [], \"record_id\": " + std::to_string(entry.id) + ", \"pg_id\": 0, \"process_group\": [" +
           quoted(group) + ", " + quoted(description) +
           "], \"collective_seq_id\": " + (entry.point_to_point ? none : sequence) +
           ", \"p2p_seq_id\": " + (entry.point_to_point ? sequence : none) +
           ", \"op_id\": " + std::to_string(entry.id) + ", \"profiling_name\": " + quoted(entry.title) +
           ", \"time_created_ns\": " + std::to_string(entry.created) + ", \"input_sizes\": " + sizes +
           ", \"input_dtypes\": " + types + ", \"output_sizes\": " + sizes + ", \"output_dtypes\": " + types +
           ", \"state\": " + quoted(kStates[static_cast<int>(entry.state)]) +
           ", \"time_discovered_started_ns\": " + time_or_null(entry.started) +
           ", \"time_discovered_completed_ns\": " + time_or_null(entry.ended) +
           ", \"retired\": " + (entry.ended ? "true" : "false") +
           ", \"timeout_ms\": " + std::to_string(entry.timeout_ms) +
           ", \"is_p2p\": " + (entry.point_to_point ? "true" : "false") + "}";
}

}  // namespace

std::uint64_t FlightRecorder::add(Entry entry, bool at_once) {
    entry.created = now();
    if (at_once) {
        entry.started = entry.created;
        entry.state = CallState::kStarted;
    }
    const std::lock_guard lock(mutex_);
    entry.id = next_++;
    ring_[entry.id % kEntries] = entry;
    return entry.id;
}

FlightRecorder::Entry* FlightRecorder::find(std::uint64_t id) {
    static_assert(std::has_single_bit(kEntries), "the numbers of entries wrap at 2^64");
    Entry& entry = ring_[id % kEntries];
    return entry.id == id ? &entry : nullptr;
}

void FlightRecorder::start(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    if (Entry* entry = find(id); entry && !entry->started) {
        entry->started = now();
        entry->state = CallState::kStarted;
    }
}

void FlightRecorder::end(std::uint64_t id, bool well) {
    const std::lock_guard lock(mutex_);
    if (Entry* entry = find(id)) {
        entry->ended = now();
        entry->state = well ? CallState::kCompleted : CallState::kFailed;
    }
}

std::vector<FlightRecorder::Entry> FlightRecorder::entries() const {
    const std::lock_guard lock(mutex_);
    std::vector<Entry> entries;
    for (std::uint64_t id = next_ - kEntries; id != next_; ++id) {  // right across the wrap from 2^64 - 1 to 0
        const Entry& entry = ring_[id % kEntries];
        if (entry.created != 0) entries.push_back(entry);
    }
    return entries;
}

std::string FlightRecorder::json(int rank, const std::string& group, const std::string& description,
                                 const std::string& ranks) const {
    std::string text = "{\"version\": " + quoted(kVersion) + ", \"rank\": " + std::to_string(rank) +
                       ", \"pg_config\": {" + quoted(group) + ": {\"name\": " + quoted(group) +
                       ", \"desc\": " + quoted(description) + ", \"ranks\": " + quoted(ranks) + "}}, \"entries\": [";
    const char* separator = "\n";
    for (const Entry& entry : entries()) {
        text += separator + text_of(entry, group, description);
        separator = ",\n";
    }
    return text + "\n]}\n";
}

void write_flight_record(const std::string& path, int rank, const std::string& record) {
    std::ofstream file(path);
    file << record << std::flush;
    if (!file)
        std::cerr << "dist_prims: rank " + std::to_string(rank) + ": the flight record of a failed call is lost, " +
                         path + " cannot be written: " + std::strerror(errno) + "\n";
}

}  // namespace dist_prims
