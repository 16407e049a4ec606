// Who reserves the shared memory of a group, and on which NUMA node it lies. A machine of one node has no placement to
// test.
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <map>
#include <thread>

#include "../common/available_memory.h"
#include "../common/thread.h"
#include "test_support.h"

using namespace dist_prims;

namespace {

constexpr std::size_t kLargeSlot = 256 << 10;  // so that most pages of a slot contain nothing else

void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<std::size_t>(core), &cores);
    CHECK(::sched_setaffinity(0, sizeof cores, &cores) == 0);
}

// A core of each NUMA node on which this process may run.
std::vector<int> core_of_each_node() {
    std::map<unsigned, int> cores;
    std::thread([&] {
        cpu_set_t all;
        CHECK(::sched_getaffinity(0, sizeof all, &all) == 0);
        for (int core = 0; core < CPU_SETSIZE; ++core) {
            if (!CPU_ISSET(static_cast<std::size_t>(core), &all)) continue;
            pin(core);
            unsigned node = 0;
            CHECK(::getcpu(nullptr, &node) == 0);
            cores[node] = core;
        }
    }).join();
    std::vector<int> one_each;
    for (const auto& [node, core] : cores) one_each.push_back(core);
    return one_each;
}

unsigned node_of(int core) {
    unsigned node = 0;
    std::thread([&] {
        pin(core);
        CHECK(::getcpu(nullptr, &node) == 0);
    }).join();
    return node;
}

// Whether all pages that lie within these bytes are on a node.
bool lie_on(unsigned node, const std::byte* data, std::size_t bytes) {
    const std::size_t page = Arena::page();
    const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
    const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
    std::vector<void*> pages;
    for (auto at = begin; at < end; at += page) {
        pages.push_back(reinterpret_cast<void*>(at));
        static_cast<void>(*reinterpret_cast<const volatile char*>(at));  // only mapped pages have a node
    }
    std::vector<int> nodes(pages.size(), -1);
    CHECK(!pages.empty());
    CHECK(::syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) == 0);
    return std::ranges::all_of(nodes, [&](int place) { return place == static_cast<int>(node); });
}

// Once all slots lay on the node of rank 0, which reserved the pages of all ranks.
CASE(the_slots_and_ring_buffers_of_each_rank_lie_on_its_numa_node) {
    constexpr int kRanks = 5;
    const std::vector<int> cores = core_of_each_node();
    const auto core_of = [&](int rank) { return cores[static_cast<std::size_t>(rank + 1) % cores.size()]; };
    Descriptor file;
    for (int rank = 0; rank < kRanks; ++rank) {
        std::thread([&] {
            pin(core_of(rank));
            if (rank == 0)
                file = HostSegment::make_memory(kRanks, kLargeSlot);
            else
                HostSegment::reserve_pages(file, rank, kRanks, kLargeSlot);
        }).join();
    }
    struct stat facts{};
    CHECK(::fstat(file.get(), &facts) == 0);
    CHECK(facts.st_blocks * 512 >= facts.st_size);
    if (cores.size() == 1) {
        std::fprintf(stderr, "this machine has one NUMA node: the placement of pages is not tested\n");
        return;
    }
    const auto memory = std::make_shared<const Mapping>(file);
    HostSegment host_segment(memory, 0, kRanks, kLargeSlot);
    const std::byte* const rings = memory->data() + Membership::bytes(kRanks) + SlotExchange::bytes(kRanks, kLargeSlot);
    for (int rank = 0; rank < kRanks; ++rank) {
        const std::size_t begin = PointToPoint::rings_begin(kRanks, rank);
        const unsigned node = node_of(core_of(rank));
        CHECK(lie_on(node, host_segment.slots.theirs(rank), 2 * kLargeSlot));
        CHECK(lie_on(node, rings + begin, PointToPoint::rings_begin(kRanks, rank + 1) - begin));
    }
}

// Else the kernel would kill ranks when the last of them reserve their parts.
CASE(memory_for_all_ranks_is_compared_with_what_is_left) {
    const int ranks = 1000;
    const std::size_t slot = available_memory() / ranks;
    check_contains(text_of(caught([&] { HostSegment::make_memory(ranks, slot); })),
                   "cannot reserve " + std::to_string(HostSegment::bytes(ranks, slot)) + " bytes of shared memory");
}

// A peer may have mapped the tensor before its owner writes to it.
CASE(a_shared_tensor_lies_on_the_numa_node_of_its_owner) {
    const std::vector<int> cores = core_of_each_node();
    if (cores.size() == 1) {
        std::fprintf(stderr, "this machine has one NUMA node: the placement of pages is not tested\n");
        return;
    }
    for (const int core : cores) {
        Exporter exporter;
        std::byte* data = nullptr;
        std::thread([&] {
            pin(core);
            data = exporter.allocate(kLargeSlot);
        }).join();
        Importer importer;
        const SharedTensorRef tensor_ref = exporter.ref_of(data, kLargeSlot);
        for (const int reader : cores) {
            std::thread([&] {
                pin(reader);
                const auto mapping = importer.map(::getpid(), tensor_ref);
                CHECK(mapping && lie_on(node_of(core), mapping->data() + tensor_ref.offset, kLargeSlot));
            }).join();
        }
        exporter.release(data);
    }
}

}  // namespace
