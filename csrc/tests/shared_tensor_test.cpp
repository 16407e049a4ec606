// Memory of tensors that ranks share: its allocation, and what becomes of it when a call fails while a peer is late.
// Ranks are threads, each with a mapping of its own of the others' memory.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../common/free_ranges.h"
#include "../shm/collectives.h"
#include "../shm/host_segment.h"
#include "../shm/in_place.h"
#include "../shm/incremental_reduce.h"
#include "test_support.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kPage = 4096;      // the smallest page of any machine, and the smallest shared tensor
constexpr std::size_t kCount = 100'000;  // elements of a tensor

// A tensor of doubles.
class Shared {
public:
    explicit Shared(std::size_t count = kCount)
        : bytes(count * 8),
          data(Exporter::instance().allocate(bytes)),
          owner(data, [&exporter = Exporter::instance()](std::byte* data) { exporter.release(data); }) {}

    SharedTensorRef ref_of() const { return Exporter::instance().ref_of(data, bytes); }
    double* values() const { return reinterpret_cast<double*>(data); }
    void fill(double value) const { std::fill_n(values(), bytes / 8, value); }
    bool is_all(double value) const {
        return std::all_of(values(), values() + bytes / 8, [=](double each) { return each == value; });
    }

    const std::size_t bytes;
    std::byte* const data;
    std::shared_ptr<std::byte> owner;
};

Call call_of(std::uint64_t sequence, const SharedTensorRef& tensor_ref) {
    Call call;
    call.collective = Collective::kAllReduce;
    call.sequence = sequence;
    call.tensor_ref = tensor_ref;
    return call;
}

void sum(HostSegment& host_segment, std::uint64_t sequence, const Shared& tensor,
         std::chrono::milliseconds timeout = 60s) {
    const SharedTensorRef tensor_ref = tensor.ref_of();
    host_segment.slots.open(call_of(sequence, tensor_ref), timeout);
    all_reduce(host_segment, DType::kFloat64, Op::kSum, tensor.data, tensor.data, tensor.bytes / 8, tensor_ref);
}

// The bytes allocated in the files of some arenas.
std::size_t allocated(const std::map<int, SharedTensorRef>& arenas) {
    std::size_t found = 0;
    for (const auto& [descriptor, tensor_ref] : arenas) {
        struct stat facts{};
        CHECK(::fstat(descriptor, &facts) == 0);
        found += static_cast<std::size_t>(facts.st_blocks) * 512;
    }
    return found;
}

// Against a plain map of what is free.
CASE(free_ranges_of_an_arena) {
    std::mt19937 random(1);
    std::vector<bool> taken(500);
    std::map<std::size_t, std::size_t> blocks;
    FreeRanges free(taken.size());
    const auto longest = [&] {
        std::size_t best = 0, now = 0;
        for (const bool each : taken) best = std::max(best, now = each ? 0 : now + 1);
        return best;
    };
    for (int turn = 0; turn < 20'000; ++turn) {
        if (random() % 2) {
            const std::size_t length = 1 + random() % 40;
            const auto begin = free.take(length);
            CHECK(begin.has_value() == (longest() >= length));
            for (std::size_t at = 0; begin && at < length; ++at) {
                CHECK(!taken.at(*begin + at));
                taken[*begin + at] = true;
            }
            if (begin) blocks[*begin] = length;
        } else if (!blocks.empty()) {
            const auto block = std::next(blocks.begin(), static_cast<long>(random() % blocks.size()));
            std::fill_n(taken.begin() + static_cast<long>(block->first), block->second, false);
            free.give_back(block->first, block->second);
            blocks.erase(block);
        }
    }
    for (const auto& [begin, length] : blocks) free.give_back(begin, length);
    CHECK(free.count() == 1);
    CHECK(free.take(taken.size()) == 0);
    CHECK(!free.take(1));
}

// Of all sizes, from several threads: few descriptors, nothing overlaps, and nothing is left.
CASE(allocation_of_shared_tensors) {
    Exporter exporter;
    const std::size_t before = open_descriptors();
    std::mutex mutex;
    std::map<int, SharedTensorRef> arenas;
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 4; ++number) {
        threads.emplace_back([&, number] {
            std::mt19937 random(number);
            std::vector<std::pair<std::byte*, std::size_t>> blocks;
            for (int turn = 0; turn < 2000; ++turn) {
                const std::size_t bytes = random() % (turn % 50 ? 9000 : 4'000'000);
                std::byte* const data = exporter.allocate(bytes);
                CHECK(reinterpret_cast<std::uintptr_t>(data) % 64 == 0);
                const SharedTensorRef tensor_ref = exporter.ref_of(data, bytes);
                CHECK(tensor_ref.is_shared() == (bytes >= kPage));
                if (tensor_ref.is_shared()) {
                    CHECK(data[0] == std::byte{0} && data[bytes - 1] == std::byte{0});
                    const std::lock_guard lock(mutex);
                    arenas[tensor_ref.descriptor] = tensor_ref;
                }
                std::memset(data, static_cast<int>(number) + 1, bytes);
                blocks.emplace_back(data, bytes);
                if (random() % 3 == 0) continue;
                const std::size_t chosen = random() % blocks.size();
                const auto [old, length] = blocks[chosen];
                for (std::size_t at = 0; at < length; at += 61) CHECK(old[at] == std::byte(number + 1));
                exporter.release(old);
                blocks[chosen] = blocks.back();
                blocks.pop_back();
            }
            for (const auto& [data, bytes] : blocks) exporter.release(data);
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(allocated(arenas) == 0);
    std::byte* const large = exporter.allocate(std::size_t{300} << 20);
    exporter.release(large);
    CHECK(open_descriptors() <= before + 4);
}

CASE(released_memory_is_freed_though_a_peer_has_it_mapped) {
    auto tensor = std::make_unique<Shared>();
    const SharedTensorRef tensor_ref = tensor->ref_of();
    tensor->fill(1);
    Importer importer;
    const auto mapping = importer.map(::getpid(), tensor_ref);
    CHECK(mapping);
    auto* const seen = reinterpret_cast<double*>(mapping->data() + tensor_ref.offset);
    CHECK(seen[kCount - 1] == 1);
    const std::map<int, SharedTensorRef> arenas{{tensor_ref.descriptor, tensor_ref}};
    const std::size_t all = allocated(arenas), page = Arena::page(), own = (tensor->bytes + page - 1) / page * page;
    tensor.reset();
    CHECK(allocated(arenas) == all - own);
}

CASE(a_file_is_known_by_its_device_too) {
    const Shared tensor;
    Importer importer;
    SharedTensorRef tensor_ref = tensor.ref_of();
    ++tensor_ref.file.device;
    CHECK(!importer.map(::getpid(), tensor_ref));
    CHECK(importer.map(::getpid(), tensor.ref_of()));
}

// As a user's thread stores to a tensor. ThreadSanitizer takes mmap for a store of its own to all of the range.
__attribute__((no_sanitize("thread"))) void increment(double* values, std::size_t first) {
    for (std::size_t at = first; at < kCount; at += kPage / 8) ++values[at];
}

// What other threads store during a withdrawal is not lost, and what a peer stores afterwards is not seen.
CASE(withdrawal_of_a_tensor) {
    Shared tensor;
    tensor.fill(0);
    const SharedTensorRef tensor_ref = tensor.ref_of();
    Importer importer;
    const auto mapping = importer.map(::getpid(), tensor_ref);
    auto* const imported = reinterpret_cast<double*>(mapping->data() + tensor_ref.offset);
    const std::map<int, SharedTensorRef> arenas{{tensor_ref.descriptor, tensor_ref}};
    const std::size_t before = allocated(arenas);
    std::atomic<int> turns{0};
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    std::vector<double> stored(2);
    for (std::size_t number = 0; number < 2; ++number) {
        threads.emplace_back([&, number] {  // each its own double of every page, behind the first one
            for (; !over || stored[number] < 100; ++turns) {
                ++stored[number];
                increment(tensor.values(), 1 + number);
            }
        });
    }
    while (turns < 50) std::this_thread::yield();
    Exporter::instance().withdraw(tensor.data, tensor.bytes);
    CHECK(!tensor.ref_of().is_shared());
    CHECK(allocated(arenas) <= before - tensor.bytes + Arena::page());
    std::fill_n(imported, kCount, 7.0);
    Exporter::instance().withdraw(tensor.data, tensor.bytes);  // nothing is left to do
    over = true;
    for (std::thread& thread : threads) thread.join();
    for (std::size_t at = 0; at < kCount; ++at) {
        const std::size_t place = at % (kPage / 8);
        CHECK(tensor.values()[at] == (place == 1 || place == 2 ? stored[place - 1] : 0));
    }
}

// The pages that a peer may still write to are not given to another tensor.
CASE(withdrawn_memory_is_not_used_again) {
    auto tensor = std::make_unique<Shared>();
    const SharedTensorRef tensor_ref = tensor->ref_of();
    Importer importer;
    const auto mapping = importer.map(::getpid(), tensor_ref);
    Exporter::instance().withdraw(tensor->data + 100, 8);  // a part of it
    tensor.reset();
    std::vector<Shared> others(20);
    for (const Shared& other : others) other.fill(1);
    std::memset(mapping->data() + tensor_ref.offset, 0, kCount * 8);
    for (const Shared& other : others) CHECK(other.ref_of().is_shared() && other.is_all(1));
}

// Rank 1 has begun when rank 0 gives up waiting, and goes on much later.
CASE(a_late_peer_overwrites_no_data) {
    std::atomic<bool> raised{false}, folded{false};
    run_ranks(2, [&](HostSegment& host_segment) {
        const Shared tensor;
        tensor.fill(1);
        sum(host_segment, 0, tensor);
        CHECK(tensor.is_all(2));
        if (host_segment.membership.rank() == 0) {
            CHECK(fails(CommError::Kind::kTimeout, [&] { sum(host_segment, 1, tensor, 300ms); }));
            tensor.fill(7);
            raised = true;
            while (!folded) std::this_thread::yield();
            CHECK(tensor.is_all(7));
            return;
        }
        host_segment.slots.open(call_of(1, tensor.ref_of()), 60s);  // as all_reduce does it, with a pause
        CHECK(fails(CommError::Kind::kTimeout, [&] {
            in_shared_memory(tensor.data, tensor.bytes, [&] {
                host_segment.slots.phase();
                const MappedTensors mapped = map_tensors(host_segment, tensor_refs_of(host_segment.slots), tensor.data);
                while (!raised) std::this_thread::yield();
                InPlace(1, DType::kFloat64, Op::kSum, mapped.places).fold_share(tensor.bytes, {});
                folded = true;
                finish_in_place(host_segment, tensor.data, tensor.bytes);
            });
        }));
        CHECK(!tensor.ref_of().is_shared());
    });
}

// After a disagreement all goes on, in the same memory.
CASE(a_mismatch_withdraws_nothing) {
    run_ranks(2, [](HostSegment& host_segment) {
        const Shared tensor;
        tensor.fill(1);
        CHECK(fails(CommError::Kind::kMismatch,
                    [&] { sum(host_segment, host_segment.membership.rank() ? 5 : 6, tensor); }));
        CHECK(tensor.is_all(1) && tensor.ref_of().is_shared());
        sum(host_segment, 7, tensor);
        CHECK(tensor.is_all(2));
    });
}

// Two groups work on parts of one tensor. One fails, so the result of the other is lost: it must not be taken for one.
CASE(a_tensor_that_is_withdrawn_under_another_call) {
    std::atomic<int> within{0};
    std::atomic<bool> withdrawn{false};
    run_ranks(2, [&](HostSegment& host_segment) {
        const Shared tensor;
        tensor.fill(1);
        sum(host_segment, 0, tensor);
        const std::size_t half = tensor.bytes / 2;
        host_segment.slots.open(call_of(1, Exporter::instance().ref_of(tensor.data, half)), 60s);
        host_segment.slots.phase();
        const MappedTensors mapped = map_tensors(host_segment, tensor_refs_of(host_segment.slots), tensor.data);
        ++within;
        while (within < 2) std::this_thread::yield();
        if (host_segment.membership.rank() == 0) {
            Exporter::instance().withdraw(tensor.data + half, half);
            withdrawn = true;
        }
        while (!withdrawn) std::this_thread::yield();
        InPlace(host_segment.membership.rank(), DType::kFloat64, Op::kSum, mapped.places).fold_share(half, {});
        const std::string error = text_of(caught([&] { finish_in_place(host_segment, tensor.data, half); }));
        const bool is_lost = error.find("the result of a collective is lost") != std::string::npos;
        CHECK(is_lost == (host_segment.membership.rank() == 0));
        if (host_segment.membership.rank() == 1)  // it is whole where nothing was withdrawn
            CHECK(std::all_of(tensor.values(), tensor.values() + kCount / 2, [](double each) { return each == 4; }));
    });
}

void put(IncrementalReduce& sum, std::size_t number, double value) {
    const auto data = std::make_shared<std::vector<double>>(kCount / 2, value);
    const std::size_t begin = number * kCount * 4;
    sum.put(number, {{begin, begin + kCount * 4}, reinterpret_cast<const std::byte*>(data->data()), 1, data});
}

std::unique_ptr<IncrementalReduce> incremental(const HostSegment& host_segment, const Shared& tensor) {
    return std::make_unique<IncrementalReduce>(tensor.data, tensor.bytes, DType::kFloat64,
                                               host_segment.membership.rank(), host_segment.membership.size(),
                                               std::make_shared<Budget>(tensor.bytes), tensor.owner);
}

// One after the other on the same tensor: a piece that a rank has yet to bring is not taken from the former sum.
CASE(two_incremental_sums_on_one_tensor) {
    std::atomic<int> brought{0};
    run_ranks(2, [&](HostSegment& host_segment) {
        const Shared tensor;
        const int rank = host_segment.membership.rank();
        std::uint64_t sequence = 0;
        const auto finish = [&](IncrementalReduce& sum) {
            host_segment.slots.open(call_of(sequence++, tensor.ref_of()), 60s);
            sum.finish(host_segment);
        };
        auto former = incremental(host_segment, tensor);
        for (int round = 1; round < 4; ++round) {
            for (const std::size_t number : {0u, 1u}) put(*former, number, round);
            finish(*former);
            CHECK(tensor.is_all(2 * round));
        }
        auto latter = incremental(host_segment, tensor);
        for (int round = 1; round < 4; ++round) {
            while (rank == 1 && brought < round) std::this_thread::yield();  // rank 0 is far ahead
            for (const std::size_t number : {0u, 1u}) put(*latter, number, 10 * round + rank);
            if (rank == 0) ++brought;
            finish(*latter);
            CHECK(tensor.is_all(20 * round + 1));
        }
    });
}

// Rank 1 goes on with a sum that rank 0 has dropped, and whose stamps made room for those of another one.
CASE(stamps_of_another_sum) {
    std::atomic<int> step{0};
    const auto reach = [&](int wanted) {
        while (step < wanted) std::this_thread::yield();
    };
    run_ranks(2, [&](HostSegment& host_segment) {
        const Shared tensor, other;
        const bool first = host_segment.membership.rank() == 0;
        std::uint64_t sequence = 0;
        const auto finish = [&](IncrementalReduce& sum, const Shared& of) {
            for (const std::size_t number : {0u, 1u}) put(sum, number, 1);
            host_segment.slots.open(call_of(sequence++, of.ref_of()), 60s);
            sum.finish(host_segment);
            CHECK(of.is_all(2));
        };
        auto former = incremental(host_segment, tensor);
        finish(*former, tensor);
        if (first) former.reset();
        auto latter = first ? incremental(host_segment, other) : nullptr;
        if (first) ++step;
        reach(1);
        if (!first) latter = incremental(host_segment, other);
        finish(*latter, other);
        if (first) {
            for (const std::size_t number : {0u, 1u}) put(*latter, number, 3);
            ++step;
            reach(3);
            CHECK(tensor.is_all(2));
            return;
        }
        reach(2);
        for (const std::size_t number : {0u, 1u}) put(*former, number, 5);
        ++step;
    });
}

// A sum that ends in the middle of a round, by an error or because it goes, leaves its memory to this rank alone.
void an_incremental_sum_that_ends_early(bool by_an_error) {
    std::atomic<bool> over{false};
    run_ranks(2, [&](HostSegment& host_segment) {
        const Shared tensor;
        auto sum = incremental(host_segment, tensor);
        for (const std::size_t number : {0u, 1u}) put(*sum, number, 1);
        host_segment.slots.open(call_of(0, tensor.ref_of()), 60s);
        sum->finish(host_segment);
        CHECK(tensor.is_all(2));
        if (host_segment.membership.rank() ==
            1) {  // is late with its pieces, and adds those of rank 0 when that has given up
            while (!over) std::this_thread::yield();
            for (const std::size_t number : {0u, 1u}) put(*sum, number, 5);
            over = false;
            return;
        }
        for (const std::size_t number : {0u, 1u}) put(*sum, number, 1);
        CHECK(sum->is_published());
        if (by_an_error) {
            host_segment.slots.open(call_of(1, tensor.ref_of()), 200ms);
            CHECK(fails(CommError::Kind::kTimeout, [&] { sum->finish(host_segment); }));
            CHECK(!sum->is_published());
        } else {
            sum.reset();
        }
        CHECK(!tensor.ref_of().is_shared());
        tensor.fill(9);
        over = true;
        while (over) std::this_thread::yield();
        CHECK(tensor.is_all(9));
    });
}

// A child allocates for itself; what it inherits it neither has nor harms, wherever its own memory lies.
CASE(a_forked_child_has_its_own_shared_tensors) {
    Shared tensor;
    tensor.fill(3);
    const Child child([&] {
        Exporter& own = Exporter::instance();
        CHECK(!tensor.ref_of().is_shared());
        std::vector<std::byte*> blocks;
        for (int number = 0; number < 100; ++number) {
            blocks.push_back(own.allocate(tensor.bytes));
            std::memset(blocks.back(), 1, tensor.bytes);
        }
        tensor.owner.reset();
        for (std::byte* block : blocks) own.release(block);
    });
    CHECK(child.status() == 0);
    CHECK(tensor.is_all(3) && tensor.ref_of().is_shared());
}

CASE(an_incremental_sum_ends_with_an_error) {
    an_incremental_sum_that_ends_early(true);
}

CASE(an_incremental_sum_is_destroyed_early) {
    an_incremental_sum_that_ends_early(false);
}

}  // namespace
