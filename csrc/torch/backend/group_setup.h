// The parameters of a group, and the rendezvous of its ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "../../net/multi_host.h"
#include "../../tcp/transport.h"
#include "../../ucx/library.h"
#include "creation_failure.h"
#include "execution.h"

namespace dist_prims {

class PrimsBackend;

// What MPI carries for a group, if MPI is its transport.
struct MpiEndpoint {
    std::unique_ptr<Transport> transport;
};

struct UcxEndpoint {
    std::unique_ptr<ucx::Endpoint> own;    // the worker of this rank
    std::vector<std::string> addresses{};  // of the workers of all ranks, by rank
};

// A group to be made by split or merge.
struct ChildGroup {
    c10::intrusive_ptr<c10d::Store> store;
    std::string name;
    int rank = 0, size = 0;
    Milliseconds timeout{0};
    std::vector<int> ranks;  // the ranks of the split group in its parent; empty for a merged group
};

// The members that a group is to have after a reconfigure(). A handle is a text that names a process.
struct Reconfiguration {
    std::int64_t uuid = 0;             // of this call of reconfigure()
    std::string own;                   // the handle of this process
    std::vector<std::string> handles;  // of all members
    bool is_ordered = true;            // whether the ranks have the order of the handles
    Milliseconds timeout{0};
};

// What a backend needs to make its group. read_setup() in bindings.cpp reads it from dist_prims/backend/group_setup.py.
struct Setup {
    Milliseconds timeout{0};
    std::vector<std::string> hosts;  // by rank: the host's name
    // The transports between hosts; all are null on one host. The constructor of the backend uses them up.
    std::shared_ptr<MpiEndpoint> mpi;
    std::shared_ptr<TcpEndpoint> tcp;
    std::shared_ptr<UcxEndpoint> ucx;  // if it is not null, `tcp` carries notices and diagnosis
    // Makes the gloo group for sparse tensors. Every rank must call it, when it is first needed.
    std::function<c10::intrusive_ptr<c10d::Backend>()> make_gloo;
    // Makes a group by split or merge.
    std::function<c10::intrusive_ptr<c10d::Backend>(const ChildGroup&)> make_child;
    // Makes the group of the ranks of `from` that are not excluded.
    std::function<c10::intrusive_ptr<c10d::Backend>(PrimsBackend& from, const std::vector<int>& excluded)> make_shrunk;
    // Makes the handle of this process, and the group that replaces `from`.
    std::function<std::string(int rank)> make_handle;
    std::function<c10::intrusive_ptr<c10d::Backend>(PrimsBackend& from, const Reconfiguration&)> make_reconfigured;
    ChooseSchedule choose;                   // for a group that spans hosts
    std::uint64_t network = 0;               // see MultiHostGroup::first_agreement()
    c10::intrusive_ptr<c10d::Backend> nccl;  // for CUDA tensors; may be null
    std::size_t slot_bytes = 0;              // the least size of a rank's slot in the slot exchange
    std::size_t one_shot_bytes = 0;          // the largest data that an all_reduce on one host reduces in one phase
    std::string group;                       // the name of the group, for the flight recorder and profilers
    std::vector<uint64_t> ranks;             // the global ranks of the group, for the same
    // Called when the group is made, with the costs of the link between hosts if they have been measured. Returns the
    // description of the group in traces.
    std::function<std::string(const LinkCosts&)> describe;
    std::string dump;  // the file to which the flight record is written when a call fails; may be empty
};

// `names`: the host's name of each rank.
Hosts hosts_of(const std::vector<std::string>& names, int rank);

// Makes the shared memory of the ranks of this host; the first of them tells the others by the store where it is. The
// wait for the others calls `creation_failure`. `ended` returns a rank of this host that is known from another group to
// have ended, or -1.
std::shared_ptr<HostSegment> make_host_segment(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                               const Setup& setup, const Hosts& hosts,
                                               const CreationFailure& creation_failure,
                                               const std::function<int()>& ended);

// Deletes the key of make_host_segment() in the store. Every rank must have mapped the memory.
void delete_rendezvous_key(c10d::Store& store, int rank, const Hosts& hosts);

std::shared_ptr<Execution> make_execution(const std::shared_ptr<HostSegment>& host_segment, int rank,
                                          const Setup& setup, Hosts hosts);

}  // namespace dist_prims
