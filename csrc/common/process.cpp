#include "process.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace dist_prims {
namespace {

// What this process knows of itself and of others.
struct Registry {
    std::mutex mutex;
    ProcessId id;
    std::map<ProcessId, std::weak_ptr<const Descriptor>> known;
    Descriptor read_end, write_end;  // of the pipe that stands in for a pidfd

    Registry() { fill_random(&id, sizeof(id)); }
};

// fork() takes the mutex, so the child finds the registry whole, empties it and takes an identity of its own. It closes
// the write end, which must not outlive the parent.
Registry& registry() {
    static Registry* const one = [] {
        static auto* const made = new Registry;  // groups may outlive every static object
        ::pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                         [] {
                             fill_random(&made->id, sizeof(made->id));
                             made->known.clear();
                             made->read_end = Descriptor();
                             made->write_end = Descriptor();
                             made->mutex.unlock();
                         });
        return made;
    }();
    return *one;
}

// The read end of the pipe of this process, once more.
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
    static std::atomic<int> number{::getpid()};
    static const int listening = ::pthread_atfork(nullptr, nullptr, [] { number = ::getpid(); });
    static_cast<void>(listening);
    return number.load(std::memory_order_relaxed);
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
    std::vector<KnownProcess> found;
    for (const auto& [id, known] : own.known) {
        if (auto exit = known.lock()) found.push_back({id, std::move(exit)});
    }
    return found;
}

ExitDescriptor find_exit_descriptor(const ProcessId& id) {
    Registry& own = registry();
    const std::lock_guard lock(own.mutex);
    const auto found = own.known.find(id);
    return found == own.known.end() ? nullptr : found->second.lock();
}

ExitDescriptor share_exit_descriptor(const ProcessId& id, Descriptor received) {
    Registry& own = registry();
    const std::lock_guard lock(own.mutex);
    std::erase_if(own.known, [](const auto& each) { return each.second.expired(); });
    if (auto exit = own.known[id].lock()) return exit;
    auto exit = std::make_shared<const Descriptor>(std::move(received));
    own.known[id] = exit;
    return exit;
}

}  // namespace dist_prims
