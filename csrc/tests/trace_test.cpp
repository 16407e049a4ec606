// Traces: what the hooks record, on several threads and in forked processes, and that a trace ends while threads write.
#include "../common/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>

#include "../shm/collectives.h"
#include "test_support.h"

using namespace dist_prims;

namespace {

constexpr std::size_t kHeader = 4096;

// A file as dist_prims/tracing makes it, without slots for Python, which is removed with this object.
class TraceFile {
public:
    explicit TraceFile(std::uint64_t capacity) {
        const int file = ::mkstemp(path_);
        CHECK(file >= 0);
        const std::uint64_t header[] = {0x3130454341525444, 1, capacity, kHeader};
        CHECK(::ftruncate(file, static_cast<off_t>(kHeader + capacity * sizeof(TraceEvent))) == 0);
        CHECK(::pwrite(file, header, sizeof(header), 0) == sizeof(header));
        ::close(file);
        int error = 0;
        number_ = dist_prims_trace_open(path_, &error);
        CHECK(number_ > 0);
        dist_prims_trace_select(number_);
    }
    ~TraceFile() { ::unlink(path_); }

    void end() const {
        dist_prims_trace_select(0);
        dist_prims_trace_close(number_);
    }
    const char* path() const { return path_; }
    std::uint64_t taken() const {
        std::uint64_t found = 0;
        std::memcpy(&found, bytes().data() + 64, sizeof(found));
        return found;
    }
    void set_taken(std::uint64_t value) const {
        const int file = ::open(path_, O_WRONLY);
        CHECK(::pwrite(file, &value, sizeof(value), 64) == sizeof(value));
        ::close(file);
    }
    std::vector<TraceEvent> events(TraceKind kind) const {
        const std::string all = bytes();
        std::vector<TraceEvent> found;
        for (std::size_t at = kHeader; at < all.size(); at += sizeof(TraceEvent)) {
            TraceEvent event;
            std::memcpy(&event, all.data() + at, sizeof(event));
            if (event.kind == kind) found.push_back(event);
        }
        return found;
    }

private:
    std::string bytes() const {
        std::ifstream file(path_, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    }

    char path_[32] = "/tmp/dist_prims_trace_XXXXXX";
    int number_;
};

Call call_of(std::uint64_t sequence, std::uint64_t count) {
    Call call;
    call.collective = Collective::kAllReduce;
    call.dtype = DType::kFloat32;
    call.op = Op::kSum;
    call.sequence = sequence;
    call.count = count;
    return call;
}

void reduce_ones(HostSegment& host_segment, const TraceGroup& group, std::uint64_t sequence, std::size_t count) {
    std::vector<float> data(count, 1);
    auto* const place = reinterpret_cast<std::byte*>(data.data());
    const Call call = call_of(sequence, count);
    const TraceCall traced(group, call);
    host_segment.slots.open(call, std::chrono::seconds(60));
    all_reduce(host_segment, call.dtype, call.op, place, place, count);
    CHECK(data[0] == static_cast<float>(host_segment.slots.size()));
}

}  // namespace

CASE(a_trace_has_the_phases_of_each_collective) {
    const TraceFile file(1000);
    const TraceGroup group("{}");
    run_ranks(3, [&](HostSegment& host_segment) {
        for (std::uint64_t sequence = 0; sequence < 4; ++sequence) reduce_ones(host_segment, group, sequence, 2);
    });
    file.end();
    const auto calls = file.events(TraceKind::kCollective);
    CHECK(calls.size() == 12);
    for (const TraceEvent& call : calls) {
        CHECK(call.bytes == 8 && call.group == group.number() && call.begin <= call.end && !call.failed);
        CHECK(call.thread != 0 && call.op == static_cast<std::uint8_t>(Op::kSum));
        int copies = 0, reductions = 0;
        for (const TraceEvent& each : file.events(TraceKind::kCopy)) {
            if (each.thread != call.thread || each.sequence != call.sequence) continue;
            CHECK(each.step == 0 && call.begin <= each.begin && each.end <= call.end);
            ++copies;
        }
        for (const TraceEvent& each : file.events(TraceKind::kReduce)) {
            if (each.thread != call.thread || each.sequence != call.sequence) continue;
            CHECK(each.step == 1 && each.bytes == 8);
            ++reductions;
        }
        CHECK(copies == 1 && reductions == 1);
    }
    const auto waits = file.events(TraceKind::kWait);
    CHECK(!waits.empty());  // of three ranks at least one is not the last
    for (const TraceEvent& each : waits) CHECK(each.peer >= 0 && each.peer < 3 && each.group == group.number());
}

CASE(a_trace_has_the_steps_and_messages_of_a_schedule) {
    const TraceFile file(10000);
    const TraceGroup group("{}");
    constexpr int kRanks = 3, kSegments = 2;
    run_ranks(kRanks, [&](HostSegment& host_segment) {
        const int rank = host_segment.membership.rank();
        Router router(host_segment.p2p, {}, nullptr);
        std::vector<float> data(3000, 1);
        Call call = call_of(7, data.size());
        call.set_algorithm("ring");
        const TraceCall traced(group, call);
        const auto buffer = ProgramBuffer::whole(reinterpret_cast<std::byte*>(data.data()), data.size());
        execute(ring(kRanks, rank), router, call.dtype, call.op, buffer, kSegments, std::chrono::seconds(60));
        CHECK(data[0] == kRanks);
    });
    file.end();
    const std::size_t all = kRanks * 2 * (kRanks - 1) * kSegments;
    for (const TraceKind kind : {TraceKind::kStep, TraceKind::kSend, TraceKind::kReceive}) {
        const auto found = file.events(kind);
        CHECK(found.size() == all);
        std::size_t by_step[2 * (kRanks - 1)][kSegments] = {};
        for (const TraceEvent& each : found) {
            CHECK(each.sequence == 7 && each.group == group.number() && each.begin <= each.end);
            CHECK(kind == TraceKind::kStep || each.bytes == 2000);
            ++by_step[each.step][each.segment];
        }
        for (const auto& segments : by_step)
            for (const std::size_t count : segments) CHECK(count == kRanks);
    }
    const auto calls = file.events(TraceKind::kCollective);
    CHECK(calls.size() == kRanks && calls[0].name == 1);
}

CASE(numbers_of_groups_wrap) {
    constexpr std::uint32_t kLast = std::numeric_limits<std::uint32_t>::max();
    const std::map<std::uint32_t, std::string> in_use{{1, ""}, {2, ""}, {4, ""}, {kLast, ""}};
    CHECK(next_trace_group(kLast - 2, in_use) == kLast - 1);
    CHECK(next_trace_group(kLast - 1, in_use) == 3);  // 0 means no group
    CHECK(next_trace_group(3, in_use) == 5);
}

CASE(a_full_trace_counts_what_it_drops) {
    const TraceFile file(10);
    run_ranks(1, [](HostSegment&) {
        for (int each = 0; each < 25; ++each) const TraceSpan span(TraceKind::kCopy, 1);
    });
    file.end();
    CHECK(file.taken() == 25);
    CHECK(file.events(TraceKind::kCopy).size() == 10);
}

// The count of taken slots stops at 2^63. At its wrap to 0 it would give out the slots of the first events again.
CASE(a_trace_stops_counting_slots_before_the_counter_wraps) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 63;
    for (const std::uint64_t taken : {kMost - 2, kMost + 3, std::numeric_limits<std::uint64_t>::max() - 1}) {
        const TraceFile file(10);
        file.set_taken(taken);
        for (int each = 0; each < 25; ++each) const TraceSpan span(TraceKind::kCopy, 1);
        file.end();
        CHECK(file.taken() == kMost || file.taken() == kMost + 1);
        CHECK(file.events(TraceKind::kCopy).empty());
    }
}

CASE(a_trace_may_end_while_threads_write) {
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (int each = 0; each < 4; ++each) {
        threads.emplace_back([&] {
            while (!is_over) const TraceSpan span(TraceKind::kCopy, 1);
        });
    }
    for (int round = 0; round < 20; ++round) {
        const TraceFile file(1000);
        wait_until([&] { return file.taken() > 100; });
        file.end();
        CHECK(::truncate(file.path(), 0) == 0);  // a late event in the file would be a SIGBUS
    }
    is_over = true;
    for (std::thread& thread : threads) thread.join();
}

CASE(a_forked_child_does_not_write_to_the_trace) {
    const TraceGroup of_parent("{}");
    const TraceFile file(100);
    CHECK(file.events(TraceKind::kText).size() == 1);  // the description of the group
    const TraceSpan open(TraceKind::kReduce);
    const Child child([&] {
        {
            const TraceSpan span(TraceKind::kCopy);
            const TraceGroup group("{\"name\": \"of the child\"}");
        }
        const TraceFile own(100);
        {
            const TraceSpan span(TraceKind::kCopy);
        }
        own.end();
        const bool is_traced = own.events(TraceKind::kCopy).size() == 1 && own.events(TraceKind::kText).empty();
        ::unlink(own.path());
        CHECK(is_traced);
    });
    CHECK(child.status() == 0);
    CHECK(file.taken() == 1);
    {
        const TraceSpan span(TraceKind::kCopy);
    }
    CHECK(file.taken() == 2);
    file.end();
}

CASE(a_damaged_trace_file_is_refused) {
    char path[] = "/tmp/dist_prims_trace_XXXXXX";
    const int file = ::mkstemp(path);
    int error = 0;
    CHECK(dist_prims_trace_open(path, &error) == -1 && error == EINVAL);  // empty
    const std::uint64_t header[] = {0x3130454341525444, 1, std::uint64_t{1} << 60, kHeader};
    CHECK(::ftruncate(file, kHeader) == 0 && ::pwrite(file, header, sizeof(header), 0) == sizeof(header));
    CHECK(dist_prims_trace_open(path, &error) == -1 && error == EINVAL);  // with fewer slots than it says
    ::unlink(path);
    CHECK(dist_prims_trace_open(path, &error) == -1 && error == ENOENT);
    ::close(file);
}
