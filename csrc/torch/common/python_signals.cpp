#include "python_signals.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dist_prims {

void run_python_signal_handlers() {
    if (::syscall(SYS_gettid) != ::getpid()) return;  // not the main thread
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace dist_prims
