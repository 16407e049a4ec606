// Ctrl-C, and other signals that Python handles, in the waits of this library.
//
// Python runs its signal handlers on the main thread, between two of its own instructions. A call of this library that
// waits on the main thread would delay them until its end. Each wait therefore calls this function at intervals.
#pragma once

namespace dist_prims {

bool is_main_thread();

// Runs pending signal handlers of Python, and throws what they raise, such as KeyboardInterrupt. Takes the GIL. On
// another thread than the main thread it does nothing.
void run_python_signal_handlers();

}  // namespace dist_prims
