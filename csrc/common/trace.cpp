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
constexpr std::uint64_t kMostTaken = std::uint64_t{1} << 63;  // the greatest count of taken slots
constexpr std::uint8_t kNameText = 1, kGroupText = 2;

// A slot with a piece of a text.
struct TextSlot {
    static constexpr std::size_t kBytes = 55;

    std::uint32_t number;  // of the text
    std::uint16_t part;    // of the text, from 0
    std::uint8_t bytes;    // used bytes of `text`
    char text[kBytes];
    std::uint8_t kind;    // kNameText or kGroupText
    TraceKind slot_kind;  // kText
};
static_assert(sizeof(TextSlot) == sizeof(TraceEvent));

// The traces and groups of this process. Never destroyed, because groups may outlive every static object.
struct TraceRegistry {
    std::mutex mutex;
    std::vector<std::unique_ptr<TraceBuffer>> buffers;  // by number - 1; never removed: a thread may use one late
    std::map<std::uint32_t, std::string> groups;        // descriptions by number
    std::uint32_t last_group = 0;
};

TraceRegistry& registry() {
    static auto* const registry = new TraceRegistry;
    [[maybe_unused]] static const int is_watching_forks =
        ::pthread_atfork([] { registry->mutex.lock(); }, [] { registry->mutex.unlock(); },
                         [] {
                             active_trace.store(nullptr, std::memory_order_relaxed);
                             trace_context.thread = 0;  // the only thread of the child has another number
                             for (const auto& buffer : registry->buffers) buffer->detach();
                             registry->groups.clear();  // the child is a rank of none of them
                             registry->mutex.unlock();
                         });
    return *registry;
}

// The number of this thread in the kernel.
std::uint32_t thread_number() {
    if (trace_context.thread == 0) [[unlikely]]
        trace_context.thread = static_cast<std::uint32_t>(::syscall(SYS_gettid));
    return trace_context.thread;
}

void store_kind(std::byte* slot, TraceKind kind) {
    auto& slot_kind = *reinterpret_cast<TraceKind*>(slot + offsetof(TraceEvent, kind));
    std::atomic_ref(slot_kind).store(kind, std::memory_order_release);
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

// 1. In one system call a page replaces the header, whose `next` says that no slot is free. From then on late events
//    are dropped, and no slot is taken twice.
// 2. Empty pages replace the slots. Events that have taken their slots before may write to either mapping.
// Bare system calls, because ThreadSanitizer takes mmap() for a write to all of the memory: a race with these events.
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

// The next free slot; null if there is none.
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
    auto& stored = *new (slot) TraceEvent(event);
    stored.kind = TraceKind::kUnfinished;
    stored.thread = thread_number();
    store_kind(slot, kind);
}

void TraceBuffer::add_text(std::uint8_t kind, std::uint32_t number, const std::string& text) {
    for (std::size_t at = 0, part = 0; at < text.size(); at += TextSlot::kBytes, ++part) {
        std::byte* const slot = take();
        if (!slot) return;
        TextSlot content{};
        content.number = number;
        content.part = static_cast<std::uint16_t>(part);
        content.bytes = static_cast<std::uint8_t>(std::min(TextSlot::kBytes, text.size() - at));
        content.kind = kind;
        std::memcpy(content.text, text.data() + at, content.bytes);
        std::memcpy(slot, &content, offsetof(TextSlot, slot_kind));
        store_kind(slot, TraceKind::kText);
    }
}

std::uint32_t TraceBuffer::name(const char* text) try {
    const std::lock_guard lock(names_guard_);
    const auto [entry, is_new] = names_.try_emplace(text, static_cast<std::uint32_t>(names_.size() + 1));
    if (is_new) add_text(kNameText, entry->second, entry->first);
    return entry->second;
} catch (const std::bad_alloc&) {
    return 0;
}

void TraceBuffer::add_group(std::uint32_t number, const std::string& description) {
    add_text(kGroupText, number, description);
}

namespace {

// Adds an event that ends now, unless the trace has ended since the event began.
void add_event(TraceKind kind, std::int64_t begin, std::uint64_t bytes, int peer, const TraceContext& context) {
    TraceBuffer* const buffer = tracing();
    if (!buffer) return;
    buffer->add({.begin = begin,
                 .end = trace_now(),
                 .bytes = bytes,
                 .sequence = context.sequence,
                 .peer = peer,
                 .step = context.step,
                 .group = context.group,
                 .segment = context.segment,
                 .kind = kind});
}

}  // namespace

void TraceSpan::end() const {
    add_event(kind_, begin_, bytes_, peer_, trace_context);
}

void TraceTransfer::record(bool outgoing, int peer, std::uint64_t bytes) const {
    add_event(outgoing ? TraceKind::kSend : TraceKind::kReceive, posted_, bytes, peer, context_);
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
    if (!begin_) return;
    TraceContext context = trace_context;
    context.step = static_cast<std::int32_t>(step_);
    context.segment = static_cast<std::uint16_t>(segment_);
    add_event(TraceKind::kStep, begin_, 0, -1, context);
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
          for (const auto& buffer : own.buffers) {
              if (buffer->is_open()) buffer->add_group(own.last_group, description);
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
        auto buffer = std::make_unique<TraceBuffer>(path);
        TraceRegistry& own = registry();
        const std::lock_guard lock(own.mutex);
        for (const auto& [number, description] : own.groups) buffer->add_group(number, description);
        own.buffers.push_back(std::move(buffer));
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
