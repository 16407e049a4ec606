#include "process.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace dist_prims {
namespace {

struct WatchedProcess {
    std::weak_ptr<const Descriptor> exit;  // expired when no group uses it any more
    int pid = 0;
};

// The identity of this process, and the exit descriptors of other processes.
struct Registry {
    std::mutex mutex;
    ProcessId id;
    std::map<ProcessId, WatchedProcess> known;
    Descriptor read_end, write_end;  // of the pipe that replaces a pidfd; made when it is needed

    Registry() { fill_random(&id, sizeof(id)); }
};

// The registry is never destroyed, because groups may outlive every static object. fork() locks the mutex, so the child
// gets a consistent registry. The child empties it and takes an identity of its own. It closes its copy of the write
// end, because the pipe must end with the parent.
Registry& registry() {
    static auto* const registry = new Registry;
    [[maybe_unused]] static const int is_watching_forks =
        ::pthread_atfork([] { registry->mutex.lock(); }, [] { registry->mutex.unlock(); },
                         [] {
                             fill_random(&registry->id, sizeof(registry->id));
                             registry->known.clear();
                             registry->read_end = Descriptor();
                             registry->write_end = Descriptor();
                             registry->mutex.unlock();
                         });
    return *registry;
}

// The pid of the process of a pidfd; 0 if the descriptor is not a pidfd, or the pid has no meaning here.
int pid_of(const Descriptor& pidfd) {
    std::ifstream file("/proc/self/fdinfo/" + std::to_string(pidfd.get()));
    int pid = 0;
    for (std::string field; file >> field;) {
        if (field == "Pid:") file >> pid;
    }
    return std::max(pid, 0);  // -1: the process has ended
}

// A duplicate of the read end of this process's pipe.
Descriptor copy_read_end() {
    constexpr const char* kWhat = "a pipe that tells other ranks of the end of this process";
    Registry& own = registry();
    const std::lock_guard lock(own.mutex);
    if (own.read_end.get() < 0) {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno(kWhat);
        own.read_end = Descriptor(ends[0]);
        own.write_end = Descriptor(ends[1]);
    }
    Descriptor copy(::fcntl(own.read_end.get(), F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) throw_errno(kWhat);
    return copy;
}

}  // namespace

int this_process() {
    static std::atomic<int> pid{::getpid()};
    [[maybe_unused]] static const int is_watching_forks = ::pthread_atfork(nullptr, nullptr, [] { pid = ::getpid(); });
    return pid.load(std::memory_order_relaxed);
}

void fill_random(void* data, std::size_t bytes) {
    const auto got = uninterrupted([&] { return ::getrandom(data, bytes, 0); });
    if (got != static_cast<ssize_t>(bytes)) throw_errno("getrandom");
}

ProcessId this_process_id() {
    Registry& own = registry();
    const std::lock_guard lock(own.mutex);
    return own.id;
}

Descriptor make_exit_descriptor() {
    Descriptor opened(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    if (opened.get() >= 0) return opened;
    if (errno == EMFILE || errno == ENFILE) throw_errno("pidfd_open");
    return copy_read_end();
}

std::uint64_t pid_namespace() {
    struct stat facts{};
    return ::stat("/proc/self/ns/pid", &facts) == 0 ? facts.st_ino : 0;
}

std::vector<KnownProcess> known_processes() {
    Registry& own = registry();
    const std::lock_guard lock(own.mutex);
    std::vector<KnownProcess> processes;
    for (const auto& [id, known] : own.known) {
        if (auto exit = known.exit.lock()) processes.push_back({id, std::move(exit), known.pid});
    }
    return processes;
}

ExitDescriptor find_exit_descriptor(const ProcessId& id) {
    Registry& own = registry();
    const std::lock_guard lock(own.mutex);
    const auto entry = own.known.find(id);
    return entry == own.known.end() ? nullptr : entry->second.exit.lock();
}

ExitDescriptor share_exit_descriptor(const ProcessId& id, Descriptor received) {
    Registry& own = registry();
    const std::lock_guard lock(own.mutex);
    std::erase_if(own.known, [](const auto& entry) { return entry.second.exit.expired(); });
    WatchedProcess& process = own.known[id];
    if (auto exit = process.exit.lock()) return exit;
    auto exit = std::make_shared<const Descriptor>(std::move(received));
    process = {exit, pid_of(*exit)};
    return exit;
}

}  // namespace dist_prims
