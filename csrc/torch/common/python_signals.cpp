#include "python_signals.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dist_prims {

bool is_main_thread() {
    return ::syscall(SYS_gettid) == ::getpid();
}

void run_python_signal_handlers() {
    if (!is_main_thread()) return;
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace dist_prims
