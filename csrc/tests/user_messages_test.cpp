// Messages of users in a group that spans hosts, all ranks as threads, over TCP.
#include "../net/user_messages.h"

#include <atomic>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "in_memory_network.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

const std::vector<std::vector<int>> kHosts{{0, 1}, {2}, {3, 4}};
constexpr int kSize = 5;

// The messages of one rank. Through shared memory to ranks of its host, as in the backend.
struct Rank {
    Rank(MultiHostGroup& group, HostSegment& given)
        : host_segment(given), messages(std::make_shared<UserMessages>(group.remote, given.p2p, given.membership)) {}
    ~Rank() {
        host_segment.p2p.close(left);
        messages->close(left);
    }

    HostSegment& host_segment;
    std::shared_ptr<UserMessages> messages;
    const std::exception_ptr left = std::make_exception_ptr(CommError(CommError::Kind::kPeerLeft, "left"));
};

struct Number {
    std::uint64_t value = 0;
    std::atomic<bool> is_done{false};
    std::exception_ptr error{};
};
using NumberPtr = std::shared_ptr<Number>;

UserMessages::Memory memory_of(const NumberPtr& number) {
    return {reinterpret_cast<std::byte*>(&number->value), sizeof(number->value), number};
}

PointToPoint::Done done_of(const NumberPtr& number) {
    return [number](std::exception_ptr error) {
        number->error = error;
        number->is_done = true;
        return nullptr;
    };
}

}  // namespace

// Of a hundred receives from any rank some are waited for, by one thread or two, and some are not.
CASE(user_messages_meet_one_receive_each) {
    constexpr std::uint64_t kMessages = 100;
    const auto body = [](MultiHostGroup& group, int rank, HostSegment& host_segment) {
        Rank own(group, host_segment);
        const auto number_of = [](std::uint64_t value) {
            const auto made = std::make_shared<Number>();
            made->value = value;
            return made;
        };
        if (rank == 0) {
            std::multiset<std::uint64_t> found, expected;
            std::vector<std::pair<NumberPtr, UserMessages::Handle>> posted;
            for (std::uint64_t each = 0; each < kMessages * (kSize - 1); ++each) {
                const NumberPtr number = number_of(0);
                posted.emplace_back(
                    number, own.messages->receive(Transport::kAnyone, 3, memory_of(number), 60s, done_of(number)));
                if (each % 3) continue;
                std::thread other([&, request = posted.back().second] { own.messages->wait(request, 60s); });
                own.messages->wait(posted.back().second, 60s);
                CHECK(number->is_done);
                other.join();
            }
            for (const auto& [number, request] : posted) {
                wait_until([&, &number = number] { return number->is_done.load(); });
                own.messages->wait(request, 60s);
                CHECK(!number->error);
                CHECK(own.messages->source(*request) == static_cast<int>(number->value / kMessages));
                found.insert(number->value);
            }
            for (std::uint64_t value = kMessages; value < kMessages * kSize; ++value) expected.insert(value);
            CHECK(found == expected);
        } else {
            for (std::uint64_t each = 0; each < kMessages; ++each) {
                const NumberPtr number = number_of(static_cast<std::uint64_t>(rank) * kMessages + each);
                if (rank == 1) {
                    const auto request = host_segment.p2p.send(0, 3, memory_of(number).data, 8, 60s, done_of(number));
                    host_segment.p2p.wait(request, 60s);
                } else {
                    own.messages->wait(own.messages->send(0, 3, memory_of(number), 60s, done_of(number)), 60s);
                }
                CHECK(number->is_done && !number->error);
            }
        }
        group.agree(sum_of(0, 1), 60s);  // no rank leaves before all messages have come
    };
    run_group(kHosts, body, over_tcp(kSize));
}

CASE(user_messages_end_with_the_group) {
    const auto body = [](MultiHostGroup& group, int rank, HostSegment& host_segment) {
        const auto named = std::make_shared<Number>(), from_any = std::make_shared<Number>();
        {
            Rank own(group, host_segment);
            group.agree(sum_of(0, 1), 60s);
            own.messages->receive(rank < 3 ? 3 : 0, 3, memory_of(named), 60s, done_of(named));
            own.messages->receive(Transport::kAnyone, 4, memory_of(from_any), 60s, done_of(from_any));
            group.agree(sum_of(1, 1), 60s);  // no rank leaves before all ranks wait
        }
        for (const NumberPtr& each : {named, from_any}) {
            CHECK(each->is_done);
            check_contains(text_of(each->error), "left");
        }
    };
    run_group(kHosts, body, over_tcp(kSize));
}

// A receive that is too late fails, names what it waited for, and ends the group; no thread waits for it.
CASE(user_messages_fail_when_it_is_too_late) {
    const auto body = [](MultiHostGroup& group, int rank, HostSegment& host_segment) {
        Rank own(group, host_segment);
        group.agree(sum_of(0, 1), 60s);
        const auto number = std::make_shared<Number>();
        if (rank == 0) {
            own.messages->receive(Transport::kAnyone, 3, memory_of(number), 100ms, done_of(number));
            wait_until([&] { return number->is_done.load(); });
            check_contains(text_of(number->error), "recv(8 bytes from any rank, tag 3)");
            group.remote.end();
        } else {
            check_contains(text_of(caught([&] { group.agree(sum_of(1, 1), 60s); })), "rank 0");
        }
    };
    run_group(kHosts, body, over_tcp(kSize));
}
