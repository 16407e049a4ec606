link_costs.o: net/link_costs.cpp net/link_costs.h net/remote_peers.h \
 net/../common/trace.h net/../common/types.h \
 net/../common/shared_memory.h net/../shm/membership.h \
 net/../shm/../common/errors.h net/../shm/../common/process.h \
 net/../shm/wait_graph.h net/slow_call.h net/transport.h \
 net/../common/claim.h net/tags.h net/timeout_diagnosis.h
