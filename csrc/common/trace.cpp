#include "trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "process.h"
#include "shared_memory.h"

namespace dist_prims {

thread_local constinit TraceContext trace_context{};
constinit std::atomic<TraceBuffer*> active_trace{nullptr};

namespace {

constexpr std::uint64_t kMagic = 0x3130454341525444;  // "DTRACE01"
constexpr std::size_t kHeaderBytes = 4096;
constexpr std::uint64_t kMostTaken = std::uint64_t{1} << 63;  // slots that are counted
constexpr std::uint8_t kNameText = 1, kGroupText = 2;

// A piece of a text, in a slot.
struct TextSlot {
    static constexpr std::size_t kBytes = 55;

    std::uint32_t number;
    std::uint16_t part;
    std::uint8_t bytes;
    char text[kBytes];
    std::uint8_t kind;
    TraceKind slot_kind;
};
static_assert(sizeof(TextSlot) == sizeof(TraceEvent));

// The traces and groups of this process. Never destroyed, because groups may outlive every static object.
struct TraceRegistry {
    std::mutex mutex;
    std::vector<std::unique_ptr<TraceBuffer>> buffers;  // by number - 1; they stay, since a thread may use one late
    std::map<std::uint32_t, std::string> groups;
    std::uint32_t last_group = 0;
};

TraceRegistry& registry() {
    static TraceRegistry* const one = [] {
        static auto* const made = new TraceRegistry;
        ::pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                         [] {
                             active_trace.store(nullptr, std::memory_order_relaxed);
                             trace_context.thread = 0;  // the only thread of the child has another number
                             for (const auto& each : made->buffers) each->detach();
                             made->groups.clear();  // the child is a rank of none of them
                             made->mutex.unlock();
                         });
        return made;
    }();
    return *one;
}

std::uint32_t thread_number() {
    if (trace_context.thread == 0) [[unlikely]]
        trace_context.thread = static_cast<std::uint32_t>(::syscall(SYS_gettid));
    return trace_context.thread;
}

void store_kind(std::byte* slot, TraceKind kind) {
    auto& place = *reinterpret_cast<TraceKind*>(slot + offsetof(TraceEvent, kind));
    std::atomic_ref(place).store(kind, std::memory_order_release);
}

}  // namespace

// The first bytes of a file; dist_prims/tracing writes all but `next`.
struct TraceBuffer::Header {
    std::uint64_t magic, version, capacity, offset;  // the slots of this file for C++, and where they begin
    alignas(kCacheLine) std::atomic<std::uint64_t> next;
};

TraceBuffer::TraceBuffer(const char* path) {
    const Descriptor file(::open(path, O_RDWR | O_CLOEXEC));
    struct stat facts{};
    if (file.get() < 0 || ::fstat(file.get(), &facts) != 0) throw_errno(path);
    size_ = static_cast<std::size_t>(facts.st_size);
    void* const mapped = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.get(), 0);
    if (mapped == MAP_FAILED) throw_errno(path);
    memory_ = static_cast<std::byte*>(mapped);
    const auto* header = reinterpret_cast<const Header*>(memory_);
    const bool is_whole = size_ >= kHeaderBytes && header->magic == kMagic && header->offset <= size_ &&
                          header->capacity <= (size_ - header->offset) / sizeof(TraceEvent);
    capacity_ = header->capacity;
    offset_ = header->offset;
    if (is_whole) return;
    ::munmap(memory_, size_);
    throw std::system_error(EINVAL, std::generic_category(), path);
}

// The page of the header goes first, in one system call, to a page by which no slot is free: a late event is dropped,
// and no slot is taken twice. Events that have their slots already write to them in either mapping. System calls,
// because ThreadSanitizer takes mmap() for a write to all of the memory: a race with those events.
void TraceBuffer::detach() {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, kAccess = PROT_READ | PROT_WRITE;
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const long full = ::syscall(SYS_mmap, nullptr, page, kAccess, kFlags, -1, 0);
    if (full != -1) {
        reinterpret_cast<Header*>(full)->next.store(capacity_, std::memory_order_relaxed);
        ::syscall(SYS_mremap, full, page, page, MREMAP_MAYMOVE | MREMAP_FIXED, memory_);
    }
    if (size_ > page) ::syscall(SYS_mmap, memory_ + page, size_ - page, kAccess, kFlags | MAP_FIXED, -1, 0);
    is_open_ = false;
}

std::byte* TraceBuffer::take() {
    auto* header = reinterpret_cast<Header*>(memory_);
    const std::uint64_t number = header->next.fetch_add(1, std::memory_order_relaxed);
    if (number >= capacity_) {  // the reader computes the number of dropped events from `next`
        if (number > kMostTaken) header->next.store(kMostTaken, std::memory_order_relaxed);  // never 0 again
        return nullptr;
    }
    return memory_ + offset_ + number * sizeof(TraceEvent);
}

inline void TraceBuffer::add(const TraceEvent& event) {
    std::byte* const slot = take();
    if (!slot) return;
    const TraceKind kind = event.kind;
    auto& place = *new (slot) TraceEvent(event);
    place.kind = TraceKind::kUnfinished;
    place.thread = thread_number();
    store_kind(slot, kind);
}

void TraceBuffer::add_text(std::uint8_t kind, std::uint32_t number, const std::string& text) {
    for (std::size_t at = 0, part = 0; at < text.size(); at += TextSlot::kBytes, ++part) {
        std::byte* const place = take();
        if (!place) return;
        TextSlot slot{};
        slot.number = number;
        slot.part = static_cast<std::uint16_t>(part);
        slot.bytes = static_cast<std::uint8_t>(std::min(TextSlot::kBytes, text.size() - at));
        slot.kind = kind;
        std::memcpy(slot.text, text.data() + at, slot.bytes);
        std::memcpy(place, &slot, offsetof(TextSlot, slot_kind));
        store_kind(place, TraceKind::kText);
    }
}

std::uint32_t TraceBuffer::name(const char* text) try {
    const std::lock_guard lock(names_guard_);
    const auto [found, is_new] = names_.try_emplace(text, static_cast<std::uint32_t>(names_.size() + 1));
    if (is_new) add_text(kNameText, found->second, found->first);
    return found->second;
} catch (const std::bad_alloc&) {
    return 0;
}

void TraceBuffer::add_group(std::uint32_t number, const std::string& description) {
    add_text(kGroupText, number, description);
}

void TraceSpan::end() const {
    TraceBuffer* const buffer = tracing();
    if (!buffer) return;  // it has ended meanwhile
    const TraceContext& here = trace_context;
    buffer->add({.begin = begin_,
                 .end = trace_now(),
                 .bytes = bytes_,
                 .sequence = here.sequence,
                 .peer = peer_,
                 .step = here.step,
                 .group = here.group,
                 .segment = here.segment,
                 .kind = kind_});
}

void TraceTransfer::record(bool outgoing, int peer, std::uint64_t bytes) const {
    TraceBuffer* const buffer = tracing();
    if (!buffer) return;
    buffer->add({.begin = posted_,
                 .end = trace_now(),
                 .bytes = bytes,
                 .sequence = context_.sequence,
                 .peer = peer,
                 .step = context_.step,
                 .group = context_.group,
                 .segment = context_.segment,
                 .kind = outgoing ? TraceKind::kSend : TraceKind::kReceive});
}

TraceStep::TraceStep(std::size_t step, std::size_t segment) : step_(step), segment_(segment) {
    if (!tracing()) return;
    begin_ = trace_now();
    resume();
}

void TraceStep::resume() const {
    if (!begin_) return;
    trace_context.step = static_cast<std::int32_t>(step_);
    trace_context.segment = static_cast<std::uint16_t>(segment_);
}

void TraceStep::end() const {
    TraceBuffer* const buffer = begin_ ? tracing() : nullptr;
    if (!buffer) return;
    buffer->add({.begin = begin_,
                 .end = trace_now(),
                 .sequence = trace_context.sequence,
                 .step = static_cast<std::int32_t>(step_),
                 .group = trace_context.group,
                 .segment = static_cast<std::uint16_t>(segment_),
                 .kind = TraceKind::kStep});
}

std::uint32_t next_trace_group(std::uint32_t last, const std::map<std::uint32_t, std::string>& in_use) {
    do {
        ++last;
    } while (last == 0 || in_use.contains(last));
    return last;
}

TraceGroup::TraceGroup(const std::string& description)
    : number_([&] {
          TraceRegistry& own = registry();
          const std::lock_guard lock(own.mutex);
          own.last_group = next_trace_group(own.last_group, own.groups);
          own.groups[own.last_group] = description;
          for (const auto& each : own.buffers) {
              if (each->is_open()) each->add_group(own.last_group, description);
          }
          return own.last_group;
      }()),
      owner_(this_process()) {}

TraceGroup::~TraceGroup() {
    if (owner_ != this_process()) return;
    TraceRegistry& own = registry();
    const std::lock_guard lock(own.mutex);
    own.groups.erase(number_);
}

void TraceCall::begin(const TraceGroup& group, const Call* call, std::uint64_t sequence) {
    outer_ = trace_context;
    trace_context.sequence = sequence;
    trace_context.group = group.number();
    trace_context.step = call ? 0 : -1;
    trace_context.segment = 0;
    call_ = call;
    exceptions_ = std::uncaught_exceptions();
    begin_ = trace_now();
}

namespace {

TraceEvent event_of(const Call& call, std::uint32_t group, TraceKind kind, std::int64_t begin, std::int64_t end) {
    return {.begin = begin,
            .end = end,
            .bytes = std::max(call.count * size_of(call.dtype), call.longest),
            .sequence = call.sequence,
            .peer = call.root,
            .group = group,
            .collective = static_cast<std::uint8_t>(call.collective),
            .dtype = static_cast<std::uint8_t>(call.dtype),
            .op = static_cast<std::uint8_t>(call.op),
            .kind = kind};
}

}  // namespace

void TraceCall::end() const {
    TraceBuffer* const buffer = tracing();
    if (buffer && call_) {
        TraceEvent event = event_of(*call_, trace_context.group, TraceKind::kCollective, begin_, trace_now());
        if (call_->algorithm[0]) event.name = buffer->name(call_->algorithm.data());
        event.failed = std::uncaught_exceptions() > exceptions_;
        buffer->add(event);
    }
    const std::uint32_t thread = trace_context.thread;
    trace_context = outer_;
    trace_context.thread = thread;
}

void trace_queued(const TraceGroup& group, const Call& call, std::int64_t called) {
    TraceBuffer* const buffer = called ? tracing() : nullptr;
    if (buffer) buffer->add(event_of(call, group.number(), TraceKind::kQueued, called, trace_now()));
}

}  // namespace dist_prims

using namespace dist_prims;

int dist_prims_trace_open(const char* path, int* error) {
    try {
        auto made = std::make_unique<TraceBuffer>(path);
        TraceRegistry& own = registry();
        const std::lock_guard lock(own.mutex);
        for (const auto& [number, description] : own.groups) made->add_group(number, description);
        own.buffers.push_back(std::move(made));
        return static_cast<int>(own.buffers.size());
    } catch (const std::system_error& failure) {
        *error = failure.code().value();
    } catch (const std::bad_alloc&) {
        *error = ENOMEM;
    }
    return -1;
}

void dist_prims_trace_select(int number) {
    TraceRegistry& own = registry();
    const std::lock_guard lock(own.mutex);
    active_trace.store(number > 0 ? own.buffers.at(static_cast<std::size_t>(number - 1)).get() : nullptr);
}

void dist_prims_trace_close(int number) {
    TraceRegistry& own = registry();
    const std::lock_guard lock(own.mutex);
    own.buffers.at(static_cast<std::size_t>(number - 1))->detach();
}
