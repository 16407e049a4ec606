#include "mpi_state.h"

#include <atomic>

namespace dist_prims::mpi {
namespace {

std::atomic<bool> closed{false};

}  // namespace

std::mutex& mpi_lock() {
    static std::mutex one;
    return one;
}

std::string error_text(int code) {
    std::string text(MPI_MAX_ERROR_STRING, '\0');
    int length = 0;
    if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
    text.resize(static_cast<std::size_t>(length));
    return text;
}

void check(int code, const std::string& call) {
    if (code != MPI_SUCCESS) throw Transport::TransportError(call + ": MPI says: " + error_text(code));
}

std::string unusable() {
    int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized) return "MPI is not initialised; call mpi4py.MPI.Init_thread() first";
    if (finalized || is_closed()) return "MPI has been finalised, or this process is about to end";
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED)
        return "MPI was initialised for calls from one thread only, but messages in the background are polled by a "
               "second thread; leave mpi4py.rc.thread_level at 'multiple', or call "
               "MPI.Init_thread(MPI.THREAD_MULTIPLE)";
    return "";
}

void mark_closed() {
    closed = true;
}

bool is_closed() {
    return closed;
}

}  // namespace dist_prims::mpi
