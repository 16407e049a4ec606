"""torchft's Manager over a backend: 3 replicas train, and one dies within a step: torchft_manager.py BACKEND."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from dist_prims.integrations.torchft import ProcessGroupPrims

TIMEOUT = timedelta(seconds=30)
STEPS, DIES_AT, DIES = 8, 3, 2


def replica(backend, number):
    weight = torch.zeros(4)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg={"gloo": ProcessGroupGloo, "dist_prims": ProcessGroupPrims}[backend](timeout=TIMEOUT),
        load_state_dict=lambda state: weight.copy_(state["weight"]),
        state_dict=lambda: {"weight": weight},
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"replica{number}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
    )
    start = dist.TCPStore("localhost", int(os.environ["START_PORT"]), is_master=False, timeout=TIMEOUT)
    start.set(str(number), "")
    start.wait(["0", "1", "2"])  # the lighthouse waits only for replicas whose managers exist
    sizes = []
    while manager.current_step() < STEPS:
        manager.start_quorum()
        if number == DIES and manager.current_step() >= DIES_AT:
            os._exit(0)
        gradient = torch.full((4,), float(manager.current_step() + 1))
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weight += gradient
            sizes.append(manager.num_participants())
    print(json.dumps({"last size": sizes[-1], "weight": weight.tolist()}), flush=True)
    os._exit(0)  # without the end of the servers, for which the other replica would wait


if __name__ == "__main__":
    if len(sys.argv) == 3:
        replica(sys.argv[1], int(sys.argv[2]))
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=30_000, heartbeat_timeout_ms=1000)
    start = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "START_PORT": str(start.port)}
    command = [sys.executable, __file__, sys.argv[1]]
    replicas = [
        subprocess.Popen([*command, str(number)], env=environ, stdout=subprocess.PIPE, text=True) for number in range(3)
    ]
    outputs = [each.communicate(timeout=100)[0] for each in replicas]
    lighthouse.shutdown()
    first, second = (json.loads(output) for number, output in enumerate(outputs) if number != DIES)
    print(json.dumps({**first, "same": first == second}))
