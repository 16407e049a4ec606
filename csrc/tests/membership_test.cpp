// The rendezvous of the ranks of a host, and what they see of each other's end: here ranks are processes.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "../shm/rendezvous.h"
#include "test_support.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

std::atomic<int> interruptions{0};  // how many of the next calls of fallocate a signal interrupts

}  // namespace

// Instead of libc's: recent kernels are never interrupted here, older ones are.
extern "C" int fallocate(int descriptor, int mode, off_t offset, off_t length) {
    if (interruptions.fetch_sub(1) > 0) {
        errno = EINTR;
        return -1;
    }
    return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, offset, length));
}

namespace {

// What the processes of a test share.
struct Table {
    std::atomic<int> words;  // words that rank 0 has published; the last one counts
    char word[33];
    std::atomic<int> stage;
};

class SharedPage {
public:
    SharedPage()
        : table_(static_cast<Table*>(
              ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
    ~SharedPage() { ::munmap(table_, sizeof(Table)); }
    Table* operator->() const { return table_; }

    void await(int stage) const {
        wait_until([&] { return table_->stage >= stage; });
    }

private:
    Table* const table_;
};

RendezvousOptions rendezvous(int rank, int size, std::chrono::milliseconds timeout = 60s) {
    RendezvousOptions how;
    how.rank = rank;
    how.size = size;
    how.timeout = timeout;
    return how;
}

// The rendezvous number `turn` of these ranks.
RendezvousResult meet(const SharedPage& shared, const RendezvousOptions& how, int turn = 0) {
    if (how.rank == 0) {
        return host_rendezvous(how, reserved_memory(8192), [&](const std::string& word) {
            std::memcpy(shared->word, word.c_str(), word.size() + 1);
            shared->words = turn + 1;
        });
    }
    return join_rendezvous(how, [&] { return shared->words > turn ? std::string(shared->word) : std::string(); });
}

// Run `body(rank)` in as many processes.
void processes(int size, const std::function<void(int)>& body) {
    std::vector<std::unique_ptr<Child>> children;
    for (int rank = 0; rank < size; ++rank) children.push_back(std::make_unique<Child>([&] { body(rank); }));
    for (const auto& child : children) CHECK(child->status() == 0);
}

bool has_ended(const ExitDescriptor& exit, int milliseconds) {
    pollfd entry{exit->get(), POLLIN, 0};
    return ::poll(&entry, 1, milliseconds) > 0;
}

void set_limit(rlim_t descriptors) {
    const rlimit limit{descriptors, 4096};
    CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

// Leave this process so many descriptors.
void leave_descriptors(int spare) {
    const std::size_t limit =
        open_descriptors() - 1 + static_cast<std::size_t>(spare);  // one of them listed the others
    set_limit(limit);
    while (::fcntl(0, F_DUPFD, 0) >= 0) {  // numbers below the limit may be free
    }
    for (int each = 0; each < spare; ++each) ::close(static_cast<int>(limit) - 1 - each);
}

// As a kernel before Linux 5.3, or a container that forbids the call.
void forbid_pidfd_open(int error) {
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{4, code};
    CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

// Each process that is watched costs one descriptor, however many groups watch it.
CASE(groups_share_descriptors) {
    const SharedPage shared;
    processes(4, [&](int rank) {
        std::vector<RendezvousResult> groups;
        std::size_t before = 0;
        for (int turn = 0; turn < 20; ++turn) {
            if (turn == 1) before = open_descriptors();
            groups.push_back(meet(shared, rendezvous(rank, 4), turn));
            groups.back().memory = Descriptor();  // mapped, otherwise
            shared->stage += 1;
            shared.await(4 * (turn + 1));
        }
        CHECK(open_descriptors() == before);
        for (int peer = 0; peer < 4; ++peer) {
            CHECK((groups[0].exits[static_cast<std::size_t>(peer)] == nullptr) == (peer == rank));
            CHECK(groups[0].exits[static_cast<std::size_t>(peer)] == groups[19].exits[static_cast<std::size_t>(peer)]);
        }
        groups.clear();
        CHECK(known_processes().empty());
    });
}

CASE(a_forked_child_is_another_process) {
    const ExitDescriptor watched = share_exit_descriptor({{1, 2}}, make_exit_descriptor());
    const ProcessId own = this_process_id();
    CHECK(own == this_process_id());
    CHECK(known_processes().size() == 1 && find_exit_descriptor({{1, 2}}) == watched);
    CHECK(known_processes()[0].pid == ::getpid());
    const Child child([&] {
        CHECK(this_process_id() != own);
        CHECK(known_processes().empty() && !find_exit_descriptor({{1, 2}}));
    });
    CHECK(child.status() == 0);
}

// Every rank sees every other rank's end; what a rank has forked does not hide it, and is not taken for it.
void ends_are_seen(const std::function<void()>& prepare) {
    const SharedPage shared;
    const SharedPage child_goes_on;
    processes(3, [&](int rank) {
        prepare();
        const RendezvousResult attached = meet(shared, rendezvous(rank, 3));
        const ExitDescriptor& first = attached.exits[1];
        if (rank == 1) {
            const Child short_lived([] {});
            CHECK(short_lived.status() == 0);
            const Child long_lived([&] {
                ::prctl(PR_SET_PDEATHSIG, 0);  // it outlives its rank
                child_goes_on.await(1);
            });
            shared->stage = 1;
            shared.await(3);  // the others have looked
            ::_exit(0);
        }
        shared.await(1);
        CHECK(!has_ended(first, 20));
        shared->stage += 1;
        CHECK(has_ended(first, 60000));
        CHECK(!has_ended(attached.exits[rank == 0 ? 2 : 0], 0));
        shared->stage += 1;
        shared.await(5);
    });
    child_goes_on->stage = 1;
}

// One that dies after it has connected is named by rank 0 at once; a rank that comes later does not wait for long.
CASE(a_death_during_the_rendezvous) {
    const SharedPage shared;
    const auto began = Clock::now();
    const Child second([&] {
        wait_until([&] { return shared->words > 0; });  // otherwise this rank could look before rank 0 lets it connect
        RendezvousOptions how = rendezvous(1, 3);
        how.look = [&] { shared->stage = 1; };  // it has waited for 50 ms
        meet(shared, how);
    });
    const Child last([&] {
        shared.await(2);
        CHECK(fails(CommError::Kind::kPeerDied, [&] { meet(shared, rendezvous(2, 3)); }, "rank 2: rank 0 does not"));
    });
    const Child first([&] {
        CHECK(fails(
            CommError::Kind::kPeerDied, [&] { meet(shared, rendezvous(0, 3)); },
            "rank 0: rank 1 has died while the group was made"));
        shared->stage = 2;
    });
    shared.await(1);
    second.send(SIGKILL);
    CHECK(second.status() == SIGKILL);
    CHECK(first.status() == 0 && last.status() == 0);
    CHECK(Clock::now() - began < 30s);
}

CASE(a_death_of_rank_0_during_the_rendezvous) {
    const SharedPage shared;
    const Child first([&] { meet(shared, rendezvous(0, 3)); });
    const Child second([&] {
        wait_until([&] { return shared->words > 0; });  // otherwise rank 0 could die before it can be found
        RendezvousOptions how = rendezvous(1, 3);
        how.look = [&] { shared->stage = 1; };
        CHECK(fails(CommError::Kind::kPeerDied, [&] { meet(shared, how); }, "rank 1: rank 0 "));
    });
    shared.await(1);
    first.send(SIGKILL);
    CHECK(first.status() == SIGKILL);
    CHECK(second.status() == 0);
}

// A rank that raises an error of its own, and goes on.
CASE(a_rank_that_gives_up) {
    const SharedPage shared;
    processes(2, [&](int rank) {
        RendezvousOptions how = rendezvous(rank, 3);
        if (rank == 1) how.look = [] { throw std::runtime_error("of its own"); };
        const std::string text = text_of(caught([&] { meet(shared, how); }));
        CHECK(text == (rank == 1 ? "of its own"
                                 : "rank 0: rank 1 gave up while the group was made; see the error that it raised"));
        shared->stage += 1;
        shared.await(2);
    });
}

// Another group knows that a rank has ended which has never connected.
CASE(an_end_that_is_known_before) {
    const SharedPage shared;
    processes(2, [&](int rank) {
        RendezvousOptions how = rendezvous(rank, 3);
        how.ended = [] { return 2; };
        const std::string text = text_of(caught([&] { meet(shared, how); }));
        CHECK(text.starts_with("rank " + std::to_string(rank) + ": rank 2 has died while the group was made"));
        shared->stage += 1;
        shared.await(2);
    });
}

CASE(rendezvous_times_out) {
    const SharedPage shared;
    const auto began = Clock::now();
    CHECK(fails(
        CommError::Kind::kTimeout, [&] { meet(shared, rendezvous(0, 3, 200ms)); },
        "rank 0: timeout after 200 ms while the group was made: no sign of rank 1, rank 2"));
    CHECK(Clock::now() - began >= 200ms);
}

// Handled signals, many of them, on all ranks.
CASE(signals_during_the_rendezvous) {
    const SharedPage shared;
    std::vector<std::unique_ptr<Child>> children;
    for (int rank = 0; rank < 3; ++rank) {
        children.push_back(std::make_unique<Child>([&, rank] {
            struct sigaction action{};
            action.sa_handler = [](int) {};
            ::sigaction(SIGUSR1, &action, nullptr);
            shared->stage += 1;
            for (int turn = 0; turn < 60; ++turn) {
                if (rank == turn % 3) std::this_thread::sleep_for(5ms);
                meet(shared, rendezvous(rank, 3), turn);
            }
            shared->stage += 1;
        }));
    }
    shared.await(3);
    for (const auto until = Clock::now() + 60s; shared->stage < 6 && Clock::now() < until;) {
        for (const auto& child : children) child->send(SIGUSR1);
        std::this_thread::sleep_for(500us);
    }
    for (const auto& child : children) CHECK(child->status() == 0);
}

// Whichever descriptor is the one too many, on rank 0 or on another rank: a clear error on that rank, soon.
void no_descriptor_is_left(int poor, int spare) {
    const SharedPage shared;
    processes(4, [&](int rank) {
        if (rank == poor) leave_descriptors(spare);
        const auto began = Clock::now();
        const auto used = std::clock();
        bool is_made = false;
        std::string text;
        try {
            meet(shared, rendezvous(rank, 4, rank == poor || spare == 10 ? 60000ms : 500ms));
            is_made = true;
        } catch (const std::runtime_error& error) {
            set_limit(1024);  // the sanitizers need a descriptor to look at an object
            text = error.what();
        }
        if (rank != poor) return;
        CHECK(is_made == (spare == 10));
        CHECK(is_made || (std::strstr(text.c_str(), "no descriptors left (its limit is") &&
                          std::strstr(text.c_str(), "`ulimit -n`")));
        CHECK(Clock::now() - began < 30s);
        CHECK(std::clock() - used < 5 * CLOCKS_PER_SEC);
    });
}

CASE(rendezvous_of_many_ranks) {
    const SharedPage shared;
    processes(32, [&](int rank) {
        for (int turn = 0; turn < 2; ++turn) {
            const RendezvousResult attached = meet(shared, rendezvous(rank, 32), turn);
            CHECK(attached.exits.size() == 32);
            for (int peer = 0; peer < 32; ++peer) CHECK(peer == rank || attached.exits[static_cast<std::size_t>(peer)]);
            shared->stage += 1;
            shared.await(32 * (turn + 1));
        }
    });
}

CASE(an_interrupted_reservation) {
    interruptions = 30;
    const Descriptor memory = reserved_memory(std::size_t{100} << 20);
    CHECK(interruptions <= 0);
    CHECK(Mapping(memory).size() == std::size_t{100} << 20);
}

CASE(ends_are_seen_by_pidfd) {
    ends_are_seen([] {});
}

CASE(ends_are_seen_without_pidfd) {
    for (const int error : {ENOSYS, EPERM}) ends_are_seen([error] { forbid_pidfd_open(error); });
}

CASE(rendezvous_without_descriptors) {
    for (int spare = 0; spare <= 4; ++spare) no_descriptor_is_left(0, spare);
    for (int spare = 0; spare <= 3; ++spare) no_descriptor_is_left(2, spare);
    for (const int poor : {0, 2}) no_descriptor_is_left(poor, 10);
}

}  // namespace
