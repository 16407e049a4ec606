"""The C++ source of the functions through which Python calls oneCCL; compiled in oneCCL's own environment."""

from __future__ import annotations

__all__: list[str] = []

SOURCE = """
#include <mpi.h>

#include <memory>
#include <oneapi/ccl.hpp>

static std::unique_ptr<ccl::communicator> world;

extern "C" void start(int* rank, int* size) {
    int given;
    ccl::init();
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &given);
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    ccl::shared_ptr_class<ccl::kvs> store;
    ccl::kvs::address_type address;
    if (*rank == 0) {
        store = ccl::create_main_kvs();
        address = store->get_address();
    }
    MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
    if (*rank != 0) store = ccl::create_kvs(address);
    world = std::make_unique<ccl::communicator>(ccl::create_communicator(*size, *rank, store));
}

extern "C" void all_reduce(float* data, size_t count) {
    ccl::allreduce(data, data, count, ccl::datatype::float32, ccl::reduction::sum, *world).wait();
}

extern "C" void stop() {
    world.reset();
    MPI_Finalize();
}
"""
