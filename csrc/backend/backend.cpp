#include "backend.h"

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <fstream>
#include <optional>

#include "work.h"

namespace dist_prims {
namespace {

// Tensor memory that peers can map, as torch asks for it.
class LendingAllocator : public c10::Allocator {
public:
    c10::DataPtr allocate(std::size_t bytes) override {
        std::byte* data = Lender::instance().allocate(bytes);
        return {data, data, release_lent, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return release_lent; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// What the profiler shows of a call.
std::vector<c10::IValue> inputs_of(const Tensors& tensors) {
    return {tensors.begin(), tensors.end()};
}

}  // namespace

PrimsBackend::PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup)
    : Backend(rank, size),
      setup_(std::move(setup)),
      options_(c10::make_intrusive<Options>("dist_prims", setup_.timeout)),
      owner_(this_process()),
      queue_(std::make_shared<Queue>()) {
    init();
    if (!setup_.one_host) {
        engine();
        return;
    }
    const auto deadline = Clock::now() + setup_.timeout;
    const std::string key = "shared memory";
    const auto tell = [&](const std::string& word) { store->set(key, word_ = word); };
    const auto ask = [&] { return word_ = store->check({key}) ? store->get_to_str(key) : std::string(); };
    const std::size_t slot = std::max(setup_.slot_bytes, Room::least_slot(size)), bytes = Room::bytes(size, slot);
    const Descriptor memory = rank == 0 ? host_memory(bytes, size, tell, deadline) : fetch_memory(rank, ask, deadline);
    room_ = std::make_shared<Room>(std::make_shared<Mapping>(memory), rank, size, slot);
    room_->one_shot = setup_.one_shot_bytes;
    room_->peers.on_wait(check_signals);
    Call first;  // the ranks must agree on this as on everything
    first.count = slot;
    first.layout = setup_.one_shot_bytes;
    first.by("one shot to " + std::to_string(first.layout) + ", slot " + std::to_string(slot));
    room_->board.open(first, setup_.timeout);
    dist_prims::barrier(room_->board);
    room_->peers.watch();
}

PrimsBackend::~PrimsBackend() {
    if (owner_ == this_process()) {
        shutdown();
        return;
    }
    // In a forked child there is no thread to join and no mapping to write to: let go of them without ending them.
    static_cast<void>(new std::shared_ptr<Room>(std::move(room_)));
    static_cast<void>(new std::shared_ptr<Queue>(std::move(queue_)));
    static_cast<void>(new Setup(setup_));
    static_cast<void>(engine_.release());
}

void PrimsBackend::setTimeout(Milliseconds timeout) {
    options_->timeout = timeout;
    for (const auto& each : {engine_, setup_.accelerator}) {
        if (each) each->setTimeout(timeout);
    }
}

void PrimsBackend::shutdown() {
    if (owner_ != this_process()) return;  // a forked child has nothing to end
    const bool held = Py_IsInitialized() && PyGILState_Check();
    std::optional<pybind11::gil_scoped_release> release;
    if (held) release.emplace();  // work that is waited for may need it
    const auto reason =
        std::make_exception_ptr(std::runtime_error("the group was destroyed before this collective began"));
    if (room_) room_->peers.leave();
    queue_->close(reason, [this] {
        if (room_) room_->peers.stop();
    });
    if (room_) room_->mail.close(reason);
}

void PrimsBackend::check_owner() const {
    TORCH_CHECK(owner_ == this_process(), "rank ", rank_,
                ": this process was forked from a rank and is none itself; use the "
                "group in process ",
                owner_, ", or start ranks with dist_prims.spawn");
}

c10d::Backend* PrimsBackend::engine() {
    const std::lock_guard lock(guard_);
    if (!engine_) engine_ = setup_.make_engine(word_);
    return engine_.get();
}

c10d::Backend* PrimsBackend::other(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
        if (tensor.is_cpu()) continue;
        TORCH_CHECK(setup_.accelerator, "rank ", rank_, ": a tensor is on ", tensor.device(),
                    ", and this torch has no NCCL for it; move it to the CPU first");
        return setup_.accelerator.get();
    }
    return room_ ? nullptr : engine();
}

// The queue for a call that runs here and now, if it is wanted so and the queue is idle.
PrimsBackend::Taken PrimsBackend::take(bool wanted) {
    return {wanted && queue_->take() ? queue_.get() : nullptr, [](Queue* queue) { queue->give_back(); }};
}

WorkPtr PrimsBackend::perform(std::vector<Task> tasks, const How& how, Tensors outputs) {
    check_owner();
    TORCH_CHECK_VALUE(!tasks.empty(), how.title, ": there is no tensor");
    const auto taken = take(!how.async);
    for (Task& task : tasks) task.call.sequence = sequence_++;
    const std::uint64_t sequence = sequence_;
    const std::uint64_t entry = record_.add(entry_of(tasks.front().call, how, sequence), taken != nullptr);
    if (taken) {
        RECORD_FUNCTION_WITH_SCOPE(at::RecordScope::USER_SCOPE, how.title, inputs_of(outputs));
        run(tasks, how.timeout, entry);
        return c10::make_intrusive<DoneWork>(rank_, how.type, std::move(outputs), sequence);
    }
    auto work = c10::make_intrusive<PrimsWork>(rank_, how.type, how.title, std::move(outputs), sequence);
    const auto job = std::make_shared<Queue::Job>();
    job->done = work->finisher();
    job->run = [this, tasks = std::move(tasks), timeout = how.timeout, entry]() mutable { run(tasks, timeout, entry); };
    if (how.async) {
        work->waits_by([queue = queue_, room = room_, job, title = how.title](Milliseconds limit) {
            if (queue->wait(job, limit, check_signals)) return;
            try {
                room->peers.give_up_waiting(std::to_string(limit.count()) + " ms in the wait for " + title +
                                            "; the group has ended, so that nothing is written late");
            } catch (const CommError&) {
                queue->wait(job, Milliseconds::max(), {});  // it ends as soon as it looks around
                throw;
            }
        });
        queue_->submit(job);
    } else {
        queue_->run(job, check_signals);
        if (work->exception()) std::rethrow_exception(work->exception());
    }
    return work;
}

Record::Entry PrimsBackend::entry_of(const Call& call, const How& how, std::uint64_t sequence) {
    Record::Entry entry{.sequence = sequence, .count = call.count, .title = how.title};
    entry.dtype = call.collective == Collective::kBarrier ? "" : name_of(call.dtype);
    entry.timeout_ms = how.timeout.count();
    return entry;
}

void PrimsBackend::run(std::vector<Task>& tasks, Milliseconds timeout, std::uint64_t entry) {
    const at::NoGradGuard no_grad;
    record_.start(entry);
    recorded(entry, [&] {
        for (Task& task : tasks) {
            room_->board.open(task.call, timeout);
            task.run(*room_);
        }
    });
}

template <typename Work>
void PrimsBackend::recorded(std::uint64_t entry, const Work& work) {
    try {
        work();
    } catch (...) {
        record_.end(entry, false);
        write_record();
        throw;
    }
    record_.end(entry, true);
}

void PrimsBackend::write_record() const {
    if (!setup_.dump.empty()) std::ofstream(setup_.dump) << record();
}

void PrimsBackend::pin(std::uint64_t low, std::uint64_t high, std::string name, Plan plan) {
    TORCH_CHECK_VALUE(room_, "a pinned schedule runs in shared memory, and the ranks are on several hosts");
    pins_.push_back({low, high, std::move(name), std::make_shared<const Plan>(std::move(plan))});
}

void PrimsBackend::all_reduce_now(at::Tensor tensor, const c10d::ReduceOp& op) {
    check_owner();
    const bool is_plain = tensor.is_cpu() && tensor.layout() == at::kStrided && packed(tensor).is_same(tensor) &&
                          op.op_ != c10d::ReduceOp::PREMUL_SUM && room_ && pins_.empty();
    const auto taken = take(is_plain);
    if (!taken) {
        c10d::AllreduceOptions opts;
        opts.reduceOp = op;
        opts.asyncOp = false;
        Tensors tensors{std::move(tensor)};
        allreduce(tensors, opts)->wait();
        return;
    }
    const auto count = static_cast<std::size_t>(tensor.numel());
    Call call = call_of(Collective::kAllReduce, tensor, count);
    call.op = checked("all_reduce", op, tensor);
    call.sequence = sequence_++;
    call.loan = Lender::instance().loan(bytes_of(tensor), count * size_of(call.dtype));
    const How how{c10d::OpType::ALLREDUCE, "dist_prims:all_reduce", options_->timeout, false};
    recorded(record_.add(entry_of(call, how, sequence_), true), [&] {
        room_->board.open(call, how.timeout);
        all_reduce(*room_, call.dtype, call.op, bytes_of(tensor), bytes_of(tensor), count, call.loan);
    });
}

at::Tensor PrimsBackend::allocateTensor(long size, at::TensorOptions options) {
    return lent_tensor({size}, options);
}

std::shared_ptr<c10::Allocator> PrimsBackend::getMemAllocator() {
    static const auto one = std::make_shared<LendingAllocator>();
    return one;
}

WorkPtr PrimsBackend::message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag) {
    check_owner();
    const auto& tensor = only(title, tensors);
    const bool outgoing = type == c10d::OpType::SEND;
    TORCH_CHECK_VALUE(peer < size_ && (peer >= 0 || type == c10d::OpType::RECVANYSOURCE), title, ": rank ", peer,
                      " is not in a group of ", size_, " ranks");
    Record::Entry entry{.sequence = ++messages_, .count = static_cast<std::uint64_t>(tensor.numel()), .title = title};
    entry.dtype = name_of(type_of(tensor));
    entry.timeout_ms = options_->timeout.count();
    entry.point_to_point = true;
    const std::uint64_t number = record_.add(entry, true);

    auto work = c10::make_intrusive<PrimsWork>(rank_, type, title, tensors, messages_);
    const Output data(tensor);
    auto done = [=, this, finish = work->finisher()](std::exception_ptr error) {
        const at::NoGradGuard no_grad;
        if (!outgoing && !error) data.deliver();
        record_.end(number, !error);
        if (error) write_record();
        return finish(error);
    };
    const auto bytes = static_cast<std::size_t>(tensor.nbytes());
    const auto key = static_cast<std::uint32_t>(tag);
    Mail& mail = room_->mail;
    const auto letter = outgoing ? mail.send(peer, key, data.data(), bytes, options_->timeout, done)
                                 : mail.receive(peer, key, data.data(), bytes, options_->timeout, done);
    work->comes_from(std::shared_ptr<const int>(letter, &letter->peer));
    work->waits_by([room = room_, letter](Milliseconds limit) {
        if (room->mail.wait(letter, limit)) return;
        try {
            room->peers.give_up_waiting(std::to_string(limit.count()) + " ms in the wait for " + letter->text());
        } catch (const CommError&) {
            room->mail.wait(letter, Milliseconds::max());  // it ends as soon as it looks around
            throw;
        }
    });
    return work;
}

WorkPtr PrimsBackend::send(Tensors& tensors, int to, int tag) {
    if (auto* who = other(tensors)) return who->send(tensors, to, tag);
    return message(c10d::OpType::SEND, "dist_prims:send", tensors, to, tag);
}

WorkPtr PrimsBackend::recv(Tensors& tensors, int from, int tag) {
    if (auto* who = other(tensors)) return who->recv(tensors, from, tag);
    return message(c10d::OpType::RECV, "dist_prims:recv", tensors, from, tag);
}

WorkPtr PrimsBackend::recvAnysource(Tensors& tensors, int tag) {
    if (auto* who = other(tensors)) return who->recvAnysource(tensors, tag);
    return message(c10d::OpType::RECVANYSOURCE, "dist_prims:recv", tensors, Mail::kAnyone, tag);
}

}  // namespace dist_prims
