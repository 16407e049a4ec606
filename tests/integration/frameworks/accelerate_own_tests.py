"""Run a test script of Accelerate: accelerate_own_tests.py BACKEND (test_script | test_sync | test_ops)."""

import runpy
import sys

import torch
from accelerate import PartialState

backend, script = sys.argv[1:]
# Accelerate uses the group that exists; by itself it chooses gloo
torch.distributed.init_process_group(backend)
state = PartialState(cpu=True)  # the scripts' own PartialState() would be that of one process where there is no GPU
assert state.num_processes == torch.distributed.get_world_size() == 2
runpy.run_module(f"accelerate.test_utils.scripts.{script}", run_name="__main__", alter_sys=True)
