"""A plug-in of pytest: a process that dies by a signal such as SIGSEGV prints its stacks of Python and C++.

The tests' process has the handlers, and those forked from it inherit them: the handler of Python's faulthandler, which
allocates nothing, and below it torch's, which prints a native stack of each thread. A thread that dies inside malloc()
can wait for itself in torch's handler; the stack of Python is printed by then, and the deadline of the test ends it.
Programs that tests start print the stack of Python only.
"""

import faulthandler
import os
import signal

import torch

faulthandler.disable()  # a worker of xdist has begun with it, by the variable below
_interrupt = signal.getsignal(signal.SIGINT)
torch._C._set_print_stack_traces_on_fatal_signal(True)
signal.signal(signal.SIGINT, _interrupt)  # torch handles it too

os.environ["PYTHONFAULTHANDLER"] = "1"
faulthandler.enable()
# pytest then writes to a copy of its own stderr; a rank has another.
os.register_at_fork(after_in_child=lambda: faulthandler.enable(file=2))
