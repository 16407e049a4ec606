multi_host.o: net/multi_host.cpp net/multi_host.h \
 net/../shm/host_segment.h net/../shm/membership.h \
 net/../shm/../common/errors.h net/../shm/../common/process.h \
 net/../shm/../common/shared_memory.h net/../shm/wait_graph.h \
 net/../shm/p2p.h net/../shm/../common/claim.h \
 net/../shm/../common/thread.h net/../shm/../common/trace.h \
 net/../shm/../common/types.h net/../shm/wait_policy.h \
 net/../shm/shared_log.h net/../shm/shared_tensors.h net/../shm/arena.h \
 net/../shm/../common/free_ranges.h net/../shm/slot_exchange.h \
 net/hosts.h net/link_costs.h net/remote_peers.h net/slow_call.h \
 net/transport.h net/tags.h net/timeout_diagnosis.h net/piggyback.h \
 net/schedule_executor.h net/router.h
