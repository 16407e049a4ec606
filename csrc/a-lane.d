lane.o: tcp/lane.cpp tcp/lane.h tcp/connection.h tcp/greeting.h \
 tcp/../common/authentication.h tcp/inbox.h tcp/../net/transport.h \
 tcp/../net/../common/claim.h tcp/socket.h tcp/polling.h \
 tcp/../common/thread.h tcp/waiting_threads.h
