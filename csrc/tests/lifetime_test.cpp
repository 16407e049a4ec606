// How the threads and the memory of a group end: closes from several places at once, callbacks that drop the last
// reference, signal handlers that use the group, errors in the middle of what is under way.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../common/queue.h"
#include "../net/schedule_executor.h"
#include "../shm/host_segment.h"
#include "test_support.h"

using namespace dist_prims;
using namespace std::chrono_literals;

// A failed allocation is an error of the program and not of the sanitizer.
extern "C" const char* __asan_default_options() {
    return "allocator_may_return_null=1";
}
extern "C" const char* __tsan_default_options() {
    return "allocator_may_return_null=1";
}

namespace {

using Callback = std::function<void()>;

Callback no_callback(std::exception_ptr) {
    return {};
}

void wait_for(const std::atomic<bool>& flag) {
    wait_until([&] { return flag.load(); });
}

bool has(const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
}

Queue::Handle job_of(Callback run, std::function<Callback(std::exception_ptr)> done = no_callback) {
    auto job = std::make_shared<Queue::Job>();
    job->run = std::move(run);
    job->done = std::move(done);
    return job;
}

// A callback on the end of a collective drops the last reference to its queue, on the thread of the queue.
CASE(a_callback_drops_the_queue) {
    for (int turn = 0; turn < 20; ++turn) {
        auto queue = std::make_shared<Queue>();
        std::weak_ptr<Queue> seen = queue;
        std::atomic<bool> dropped{false};
        queue->submit(job_of([] {},
                             [&](std::exception_ptr) -> Callback {
                                 return [&] {
                                     queue->close(nullptr, {});
                                     queue.reset();
                                     dropped = true;
                                 };
                             }));
        wait_for(dropped);
        wait_until([&] { return seen.expired(); });
    }
}

// The same with a message, on the progress thread.
CASE(a_callback_drops_the_host_segment) {
    for (int turn = 0; turn < 20; ++turn) {
        const auto mapping = memory_for(2);
        auto host_segment = std::make_shared<HostSegment>(mapping, 0, 2, kSlot);
        HostSegment other(mapping, 1, 2, kSlot);
        std::byte sent[64]{}, received[64];
        std::atomic<bool> dropped{false};
        host_segment->p2p.receive(1, 0, received, sizeof received, 60s, [&](std::exception_ptr error) -> Callback {
            CHECK(!error);
            return [&] {
                host_segment->p2p.close(nullptr);
                host_segment.reset();
                dropped = true;
            };
        });
        CHECK(other.p2p.wait(other.p2p.send(0, 0, sent, sizeof sent, 60s, nullptr), 60s));
        wait_for(dropped);
    }
}

// Threads close at once while a collective runs, others wait, and a callback closes as well. All calls return, and by
// then every job has ended.
CASE(many_threads_close_a_queue) {
    for (int turn = 0; turn < 12; ++turn) {
        const auto queue = std::make_shared<Queue>();
        std::atomic<bool> stopped{false}, begun{false}, all_submitted{false};
        std::atomic<int> ended{0}, failed{0};
        const auto close = [&] {
            queue->close(std::make_exception_ptr(std::runtime_error("closed")), [&] { stopped = true; });
        };
        const auto done = [&](std::exception_ptr error) -> Callback {
            ++ended;
            failed += error != nullptr;
            return close;
        };
        queue->submit(job_of(
            [&] {
                begun = true;
                wait_for(all_submitted);
                while (turn % 3 == 0 && !stopped) std::this_thread::yield();
            },
            done));
        const auto last = job_of([] {}, done);
        queue->submit(last);
        all_submitted = true;
        if (turn % 2) wait_for(begun);
        std::vector<std::thread> closers;
        for (int number = 0; number < 4; ++number) {
            closers.emplace_back([&] {
                close();
                CHECK(ended == 2);
            });
        }
        CHECK(queue->wait(last, 60s, {}));
        for (std::thread& closer : closers) closer.join();
        check_contains(text_of(caught([&] { queue->take("all_reduce"); })),
                       "this rank, all_reduce: the group has been destroyed");
    }
}

CASE(many_threads_close_p2p) {
    for (int turn = 0; turn < 30; ++turn) {
        const auto mapping = memory_for(2);
        HostSegment host_segment(mapping, 0, 2, kSlot), other(mapping, 1, 2, kSlot);
        std::byte nothing[8];
        std::atomic<int> ended{0};
        const auto close = [&] { host_segment.p2p.close(std::make_exception_ptr(std::runtime_error("closed"))); };
        for (PointToPoint::Tag tag = 0; tag < 3; ++tag) {
            host_segment.p2p.receive(1, tag, nothing, sizeof nothing, 60s, [&](std::exception_ptr error) -> Callback {
                CHECK(text_of(error) == "closed");
                ++ended;
                return close;
            });
        }
        std::vector<std::thread> closers;
        for (int number = 0; number < 4; ++number) {
            closers.emplace_back([&] {
                close();
                CHECK(ended == 3);
            });
        }
        for (std::thread& closer : closers) closer.join();
        const auto late = caught([&] { host_segment.p2p.send(1, 0, nothing, sizeof nothing, 60s, nullptr); });
        CHECK(text_of(late) == "closed");
    }
}

// A signal handler runs inside of a collective, on its thread: any call there is refused by name.
void a_handler_makes_a_call(bool waited) {
    const auto queue = std::make_shared<Queue>("rank 3");
    const auto other = job_of([] {});
    other->title = "broadcast";
    const auto handler = [&] {
        for (const auto& call : std::vector<Callback>{
                 [&] { queue->take(other->title); }, [&] { queue->take(other->title, false); },
                 [&] { queue->run(other, {}); }, [&] { queue->submit(other); }, [&] { queue->wait(other, 10ms, {}); },
                 [&] { queue->wait(other, std::chrono::milliseconds::max(), {}); }})
            CHECK(has(text_of(caught(call)),
                      "rank 3, broadcast: a signal handler or a finalizer makes this call inside all_reduce"));
    };
    if (waited) {
        const auto job = job_of(handler, [](std::exception_ptr error) -> Callback {
            CHECK(!error);
            return {};
        });
        job->title = "all_reduce";
        queue->run(job, {});
    } else {
        CHECK(queue->take("all_reduce"));
        handler();
        queue->give_back();
    }
    CHECK(queue->take(other->title));  // it has not been broken by that
    queue->give_back();
    queue->close(nullptr, {});
}

// A signal handler runs in a wait for a job that a thread of the queue runs. Its calls are refused there as well; a
// callback that the same wait runs may make calls.
CASE(a_handler_makes_a_call_in_a_wait) {
    const auto queue = std::make_shared<Queue>("rank 3");
    std::atomic<bool> begun{false}, handled{false};
    const auto outer = job_of([&] {
        begun = true;
        while (!handled) std::this_thread::yield();
    });
    outer->title = "all_reduce";
    queue->submit(outer);
    while (!begun) std::this_thread::yield();
    CHECK(queue->wait(outer, 60s, [&] {
        CHECK(has(text_of(caught([&] { queue->submit(job_of([] {})); })), "makes this call inside all_reduce"));
        handled = true;
    }));
    std::atomic<bool> called{false};
    const auto calls = job_of([] {},
                              [&](std::exception_ptr) -> Callback {
                                  return [&] {
                                      queue->run(job_of([] {}), {});
                                      called = true;
                                  };
                              });
    queue->run(calls, [] {});
    CHECK(called);
    queue->close(nullptr, {});
}

// A handler ends the group inside of a collective: it need not wait for what it interrupts, all others do.
CASE(a_handler_closes_a_queue) {
    const auto queue = std::make_shared<Queue>();
    std::atomic<bool> stopped{false}, over{false}, reported{false};
    CHECK(queue->take("all_reduce"));
    const auto waiting = job_of([] {},
                                [&](std::exception_ptr error) -> Callback {
                                    CHECK(text_of(error) == "closed");
                                    return [&] { reported = true; };
                                });
    std::thread([&] { queue->submit(waiting); }).join();
    const auto close = [&] {
        return queue->close(std::make_exception_ptr(std::runtime_error("closed")), [&] { stopped = true; });
    };
    CHECK(!close() && stopped && reported);
    CHECK(!close());
    std::thread beside([&] {
        CHECK(close());
        CHECK(over);
    });
    std::this_thread::sleep_for(50ms);
    over = true;
    queue->give_back();
    beside.join();
}

// An exception that no caller can catch belongs to the job or the request, or is dropped.
CASE(exceptions_stay_in_their_job) {
    const auto queue = std::make_shared<Queue>();
    const auto fails = [](std::exception_ptr) -> Callback { throw std::runtime_error("done fails"); };
    const auto tells = [](std::exception_ptr) -> Callback {
        return [] { throw std::runtime_error("callback fails"); };
    };
    for (const auto& done : std::vector<std::function<Callback(std::exception_ptr)>>{fails, tells}) {
        const auto job = job_of([] { throw std::runtime_error("run fails"); }, done);
        queue->submit(job);
        CHECK(queue->wait(job, 60s, {}));
    }
    queue->close(nullptr, {});
    const auto mapping = memory_for(2);
    HostSegment host_segment(mapping, 0, 2, kSlot), other(mapping, 1, 2, kSlot);
    std::byte data[8]{};
    for (const auto& done : std::vector<PointToPoint::Done>{fails, tells}) {
        const auto request = host_segment.p2p.receive(1, 0, data, sizeof data, 60s, done);
        CHECK(other.p2p.wait(other.p2p.send(0, 0, data, sizeof data, 60s, nullptr), 60s));
        wait_until([&] { return host_segment.p2p.is_finished(request); });
    }
}

// Another rank ends the group while a schedule runs and the progress thread moves messages because a receive of the
// user is pending: the memory of the schedule is not touched afterwards.
CASE(a_program_is_aborted) {
    constexpr int kSize = 3;
    std::mt19937 random(1);
    for (int turn = 0; turn < 30; ++turn) {
        const auto mapping = memory_for(kSize);
        const auto after = std::chrono::microseconds(random() % 20000);
        std::atomic<int> ended{0};
        std::vector<std::thread> threads;
        for (int rank = 0; rank < kSize; ++rank) {
            threads.emplace_back([&, rank] {
                HostSegment host_segment(mapping, rank, kSize, kSlot);
                Router router(host_segment.p2p, {}, nullptr);
                std::byte pending[8];
                const RankProgram program = ring(kSize, rank);
                const auto error = caught([&] {
                    host_segment.p2p.receive((rank + 1) % kSize, 99, pending, sizeof pending, 60s, no_callback);
                    for (;;) {
                        std::vector<double> data(3 << 17);
                        auto* bytes = reinterpret_cast<std::byte*>(data.data());
                        execute(program, router, DType::kFloat64, Op::kSum, ProgramBuffer::whole(bytes, data.size()), 3,
                                60s);
                    }
                });
                CHECK(has(text_of(error), "has given up waiting"));
                ++ended;
                while (ended < kSize) std::this_thread::sleep_for(1ms);
            });
        }
        threads.emplace_back([&] {
            std::this_thread::sleep_for(after);
            HostSegment(mapping, 2, kSize, kSlot).membership.give_notice({CommError::Kind::kTimeout, 2});
        });
        for (std::thread& thread : threads) thread.join();
    }
}

// An unexpected message of a length that no memory holds: the receive that waits behind it gets an error, on the
// progress thread or on the waiting thread.
void no_memory_to_put_aside(bool carried) {
    const auto mapping = memory_for(2);
    HostSegment host_segment(mapping, 0, 2, kSlot), other(mapping, 1, 2, kSlot);
    std::vector<std::byte> data(2 << 20);
    const std::size_t huge = std::size_t{1} << 62;
    const auto sent = other.p2p.send(0, 1, data.data(), huge, 60s, nullptr);  // as much of it as the ring holds
    std::byte place[8];
    std::atomic<bool> reported{false};
    const auto done = [&](std::exception_ptr error) -> Callback {
        CHECK(has(text_of(error), "rank 0: no memory for a message of 4611686018427387904 bytes from rank 1, tag 1"));
        reported = true;
        return {};
    };
    const auto request = host_segment.p2p.receive(1, 2, place, sizeof place, 60s, done);
    if (carried) {
        wait_for(reported);
    } else {
        CHECK(host_segment.p2p.wait(request, 60s));
        CHECK(request->error);
    }
    CHECK(other.p2p.wait(sent, 60s));
    // The error named the call of rank 1 as the call in which rank 0 was interrupted.
    CHECK(has(text_of(sent->error), "rank 1: rank 0 was interrupted and has ended the group, while this rank was in "));
}

// Each thread that waits looks for interrupts, however much others of its rank do.
CASE(every_thread_looks_for_interrupts) {
    HostSegment host_segment(memory_for(1), 0, 1, kSlot);
    std::atomic<int> looked{0};
    host_segment.membership.on_wait([&] { ++looked; });
    for (int number = 1; number <= 3; ++number) {
        std::thread([&] {
            host_segment.membership.check_failures([](int) { return false; }, [] { return std::string(); });
        }).join();
        CHECK(looked == number);
    }
}

// A handler stops the waits of its rank: the wait that it interrupts does not go on.
CASE(a_handler_stops_a_wait) {
    const auto mapping = memory_for(2);
    HostSegment host_segment(mapping, 0, 2, kSlot), other(mapping, 1, 2, kSlot);
    host_segment.membership.on_wait([&] { host_segment.membership.stop(); });
    host_segment.slots.open(Call{}, 60s);
    const auto error = caught([&] { host_segment.slots.phase(); });
    CHECK(has(text_of(error), "rank 0: the group was destroyed or aborted on this rank in barrier()"));
}

CASE(a_handler_makes_a_call_inside_a_collective) {
    for (const bool waited : {false, true}) a_handler_makes_a_call(waited);
}

// It was "Resource temporarily unavailable". The stacks do not fit into the address space here.
CASE(a_thread_that_cannot_start_is_named) {
    pthread_attr_t usual, huge;
    CHECK(pthread_getattr_default_np(&usual) == 0);
    CHECK(pthread_attr_init(&huge) == 0);
    CHECK(pthread_attr_setstacksize(&huge, std::size_t{1} << 47) == 0);
    CHECK(pthread_setattr_default_np(&huge) == 0);
    const auto queue = std::make_shared<Queue>("rank 3");
    const auto job = job_of([] {});
    const std::string text = text_of(caught([&] { queue->submit(job); }));
    CHECK(has(text, "rank 3: the thread of its queue cannot start; raise the limit of processes and threads"));
    CHECK(has(text, "pids.max"));
    CHECK(pthread_setattr_default_np(&usual) == 0);
    queue->submit(job);
    queue->wait(job, 60s, {});
    CHECK(queue->close(nullptr, [] {}));
}

CASE(no_memory_for_an_unexpected_message) {
    for (const bool carried : {false, true}) no_memory_to_put_aside(carried);
}

}  // namespace
