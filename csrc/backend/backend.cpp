#include "backend.h"

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <fstream>
#include <optional>

#include "engine.h"
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

Hosts hosts_of(const std::vector<std::string>& names, int rank) {
    Hosts hosts;
    std::map<std::string, std::size_t> known;
    for (std::size_t each = 0; each < names.size(); ++each) {
        const auto [found, is_new] = known.try_emplace(names[each], hosts.ranks.size());
        if (is_new) hosts.ranks.emplace_back();
        hosts.ranks[found->second].push_back(static_cast<int>(each));
    }
    hosts.mine = known.at(names[static_cast<std::size_t>(rank)]);
    return hosts;
}

std::vector<std::string> titles_of(const std::vector<std::string>& hosts) {
    std::vector<std::string> titles;
    for (const std::string& host : hosts)
        titles.push_back("rank " + std::to_string(titles.size()) + " on host " + host);
    return titles;
}

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
    meet(store);
}

// The ranks of each host attach to one memory; then all agree.
void PrimsBackend::meet(const c10::intrusive_ptr<c10d::Store>& store) {
    Hosts hosts = hosts_of(setup_.hosts, rank_);
    const std::vector<int> here = hosts.ranks[hosts.mine];
    const bool is_one_host = hosts.ranks.size() == 1;
    const int seat = hosts.seats()[static_cast<std::size_t>(rank_)], seats = static_cast<int>(here.size());
    const auto deadline = Clock::now() + setup_.timeout;
    const std::string key = "shared memory/" + std::to_string(here.front());
    const auto tell = [&](const std::string& word) { store->set(key, word); };
    const auto ask = [&] { return store->check({key}) ? store->get_to_str(key) : std::string(); };
    const std::size_t slot = std::max({setup_.slot_bytes, Room::least_slot(seats), Span::kLeastSlot});
    const Descriptor memory =
        seat == 0 ? host_memory(Room::bytes(seats, slot), seats, tell, deadline) : fetch_memory(seat, ask, deadline);
    room_ = std::make_shared<Room>(std::make_shared<Mapping>(memory), seat, seats, slot,
                                   is_one_host ? Names{} : Names{here, titles_of(setup_.hosts)});
    room_->one_shot = setup_.one_shot_bytes;
    room_->peers.on_wait(check_signals);
    if (is_one_host) {
        route_ = std::make_unique<Route>(room_->mail, std::vector<int>(), nullptr);
    } else {
        span_ = std::make_shared<Span>(std::move(hosts), *room_, std::make_unique<BackendEngine>(setup_.engine));
    }
    Call first;  // the ranks must agree on this as on everything
    first.count = slot;
    first.layout = setup_.one_shot_bytes;
    first.by("one shot to " + std::to_string(first.layout) + ", slot " + std::to_string(slot));
    try {
        agree(first, setup_.timeout);
    } catch (...) {
        stop_engine();
        throw;
    }
    room_->peers.watch();
}

PrimsBackend::~PrimsBackend() {
    if (owner_ == this_process()) {
        shutdown();
        return;
    }
    // In a forked child there is no thread to join and no mapping to write to: let go of them without ending them.
    static_cast<void>(new std::shared_ptr<Room>(std::move(room_)));
    static_cast<void>(new std::shared_ptr<Span>(std::move(span_)));
    static_cast<void>(new std::shared_ptr<Queue>(std::move(queue_)));
    static_cast<void>(new Setup(setup_));
    static_cast<void>(gloo_.release());
}

void PrimsBackend::setTimeout(Milliseconds timeout) {
    options_->timeout = timeout;
    for (const auto& each : {setup_.engine, gloo_, setup_.accelerator}) {
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
        if (span_) span_->far.wake();
    });
    if (room_) room_->mail.close(reason);
    stop_engine();
}

// MPI writes to the memory of a message until it is told not to; gloo knows when the memory has gone.
void PrimsBackend::stop_engine() {
    if (setup_.engine && setup_.engine->getBackendName() == "mpi") setup_.engine->shutdown();
}

void PrimsBackend::check_owner() const {
    TORCH_CHECK(owner_ == this_process(), "rank ", rank_,
                ": this process was forked from a rank and is none itself; use the "
                "group in process ",
                owner_, ", or start ranks with dist_prims.spawn");
}

c10d::Backend* PrimsBackend::gloo() {
    const std::lock_guard lock(guard_);
    if (!gloo_) gloo_ = setup_.make_gloo();
    return gloo_.get();
}

c10d::Backend* PrimsBackend::other(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
        if (tensor.is_cpu()) continue;
        TORCH_CHECK(setup_.accelerator, "rank ", rank_, ": a tensor is on ", tensor.device(),
                    ", and this torch has no NCCL for it; move it to the CPU first");
        return setup_.accelerator.get();
    }
    return nullptr;
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
        work->waits_by([queue = queue_, room = room_, span = span_, job, title = how.title](Milliseconds limit) {
            if (queue->wait(job, limit, check_signals)) return;
            try {
                room->peers.give_up_waiting(std::to_string(limit.count()) + " ms in the wait for " + title +
                                            "; the group has ended, so that nothing is written late");
            } catch (const CommError&) {
                if (span) span->far.wake();
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
            if (task.across) {
                task.across(task.call, timeout);
            } else {
                room_->board.open(task.call, timeout);
                task.run(*room_);
            }
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
        if (span_ && room_->peers.notice()) span_->far.end();
        throw;
    }
    record_.end(entry, true);
}

void PrimsBackend::write_record() const {
    if (!setup_.dump.empty()) std::ofstream(setup_.dump) << record();
}

void PrimsBackend::all_reduce_now(at::Tensor tensor, const c10d::ReduceOp& op) {
    check_owner();
    const bool is_plain = tensor.is_cpu() && tensor.layout() == at::kStrided && packed(tensor).is_same(tensor) &&
                          op.op_ != c10d::ReduceOp::PREMUL_SUM && !span_ && pins_.empty();
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

bool PrimsBackend::reduces_lent(const at::Tensor& tensor) {
    const std::size_t bytes = tensor.nbytes();
    return tensor.is_cpu() && !span_ && bytes > room_->one_shot &&
           Lender::instance().loan(bytes_of(tensor), bytes).inode != 0 && !planned(Collective::kAllReduce, bytes);
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
            room->peers.give_up_waiting(std::to_string(limit.count()) + " ms in the wait for " +
                                        room->mail.text(*letter));
        } catch (const CommError&) {
            room->mail.wait(letter, Milliseconds::max());  // it ends as soon as it looks around
            throw;
        }
    });
    return work;
}

// Who carries a user's message, if not the mail: a receive from any rank of any host could not ask two at once.
c10d::Backend* PrimsBackend::elsewhere(const Tensors& tensors, int tag) {
    if (auto* who = other(tensors)) return who;
    if (!span_) return nullptr;
    TORCH_CHECK_VALUE(tag >= 0 && tag < Far::kUserTags, "rank ", rank_, ": tag ", tag, " of a message between hosts; ",
                      "tags there lie between 0 and ", Far::kUserTags - 1);
    return setup_.engine.get();
}

WorkPtr PrimsBackend::send(Tensors& tensors, int to, int tag) {
    if (auto* who = elsewhere(tensors, tag)) return who->send(tensors, to, tag);
    return message(c10d::OpType::SEND, "dist_prims:send", tensors, to, tag);
}

WorkPtr PrimsBackend::recv(Tensors& tensors, int from, int tag) {
    if (auto* who = elsewhere(tensors, tag)) return who->recv(tensors, from, tag);
    return message(c10d::OpType::RECV, "dist_prims:recv", tensors, from, tag);
}

WorkPtr PrimsBackend::recvAnysource(Tensors& tensors, int tag) {
    if (auto* who = elsewhere(tensors, tag)) return who->recvAnysource(tensors, tag);
    return message(c10d::OpType::RECVANYSOURCE, "dist_prims:recv", tensors, Mail::kAnyone, tag);
}

}  // namespace dist_prims
