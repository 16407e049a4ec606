"""The program of each rank of a contender, run in the contender's own environment.

    python library_rank.py prepare ENTRY HOME     # compile what the library needs, once
    python library_rank.py measure orders.json    # on each rank

It needs numpy and the contender; dist_prims only if that is the contender. The loop is that of the benchmark: new
values in the whole buffer, a barrier, one call, a check of the result; for small data another barrier and many timed
calls in a row. The barrier uses a page of shared memory and is the same for every contender, so that no contender is
measured by its own barrier.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SLOT = 64  # bytes of the page: a cache line for each rank, and one for the order to stop
_SMALL, _CALLS_IN_A_ROW, _WARMUP = 64 * 1024, 50, 2
_PERIOD = 13  # of the values, as in cases.py

Array = npt.NDArray[np.float32]
Bind = Callable[[Array], tuple[Array, Callable[[], Any]]]  # returns the buffer, or memory of the library, and its call


class SharedMemoryBarrier:
    """A barrier: every rank increments a counter in its own cache line and waits until no counter is behind."""

    def __init__(self, page: Path, rank: int, size: int, seconds: float) -> None:
        with page.open("r+b") as file:
            self._view = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._rank, self._seconds, self._count = rank, seconds, 0
        self._places = [each * SLOT // 8 for each in range(size)]
        self._stop = size * SLOT // 8

    def __call__(self) -> None:
        view, until = self._view, time.monotonic() + self._seconds
        self._count = count = self._count + 1
        view[self._places[self._rank]] = count
        for place in self._places:
            while view[place] < count:
                os.sched_yield()
                if time.monotonic() > until:
                    raise TimeoutError(f"rank {self._rank} waited {self._seconds:g} s for the others")

    def agree(self, enough: bool) -> bool:
        """Rank 0's value of ``enough`` on every rank."""
        if self._rank == 0:
            self._view[self._stop] = enough
        self()
        answer = bool(self._view[self._stop])
        self()
        return answer


def measure(
    bind: Bind, nbytes: int, rank: int, size: int, barrier: SharedMemoryBarrier, orders: dict[str, Any]
) -> dict[str, Any]:
    """The seconds of each iteration on this rank, and the number of wrong elements of all iterations."""
    count = max(nbytes // 4, 1)
    pattern = (np.arange(count + _PERIOD) % _PERIOD).astype(np.float32)
    expected, calls = np.empty(count, np.float32), _CALLS_IN_A_ROW if nbytes <= _SMALL else 1
    buffer, call = bind(_aligned(count))

    def timed(times: int) -> float:
        barrier()
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times

    seconds, wrong, began = [], 0, time.monotonic()
    for number in range(-_WARMUP, orders["iterations"][str(nbytes)]):
        start = (orders["round"] + number) % _PERIOD
        values = pattern[start : start + count]
        np.add(values, rank, out=buffer)
        taken = timed(1)
        np.multiply(values, size, out=expected)
        expected += size * (size - 1) // 2
        wrong += int(np.count_nonzero(buffer != expected))
        taken = timed(calls) if calls > 1 else taken
        if number >= 0:
            seconds.append(taken)
            if barrier.agree(time.monotonic() - began > orders["budget"]):
                break
    return {"nbytes": nbytes, "seconds": seconds, "wrong": wrong}


def _aligned(count: int) -> Array:
    """A buffer with the alignment of torch's tensors."""
    padded = np.zeros(count + 16, np.float32)
    start = -padded.ctypes.data % 64 // 4
    return padded[start : start + count]


def _own_rank() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _mpi(orders: dict[str, Any]) -> tuple[int, int, Bind]:
    mpi = import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD

    def bind(buffer: Array) -> tuple[Array, Callable[[], Any]]:
        given = [buffer, len(buffer), mpi.FLOAT]
        return buffer, lambda: world.Allreduce(mpi.IN_PLACE, given, mpi.SUM)

    return world.rank, world.size, bind


def _group(
    backend: str, direct: bool = False, shared: bool = False
) -> Callable[[dict[str, Any]], tuple[int, int, Bind]]:
    def opened(orders: dict[str, Any]) -> tuple[int, int, Bind]:
        torch, dist = import_module("torch"), import_module("torch.distributed")
        torch.set_num_threads(orders["threads"])
        rank, size = _own_rank()
        if backend != "gloo":
            import_module("dist_prims.autoload").register()
        dist.init_process_group(backend, init_method=f"file://{orders['place']}/store", rank=rank, world_size=size)
        atexit.register(dist.destroy_process_group)
        all_reduce = import_module("dist_prims").all_reduce if direct else dist.all_reduce

        def bind(buffer: Array) -> tuple[Array, Callable[[], Any]]:
            tensor = import_module("dist_prims").empty(len(buffer)) if shared else torch.from_numpy(buffer)
            return tensor.numpy(), lambda: all_reduce(tensor)

        return rank, size, bind

    return opened


def _deepspeed(orders: dict[str, Any]) -> tuple[int, int, Bind]:
    """The compiled operator without the package deepspeed, whose import takes seconds."""
    torch = import_module("torch")
    torch.set_num_threads(orders["threads"])
    rank, size = _own_rank()
    library = Path(orders["home"], "extensions/deepspeed_shm_comm/deepspeed_shm_comm.so")
    spec: Any = importlib.util.spec_from_file_location("deepspeed_shm_comm", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.initialize(size, rank)
    all_reduce = torch.ops.deepspeed.inference_all_reduce_

    def bind(buffer: Array) -> tuple[Array, Callable[[], Any]]:
        tensor = torch.from_numpy(buffer)
        return buffer, lambda: all_reduce(tensor)

    return rank, size, bind


def _oneccl(orders: dict[str, Any]) -> tuple[int, int, Bind]:
    library = ctypes.CDLL(f"{orders['home']}/all_reduce.so")
    rank, size = ctypes.c_int(), ctypes.c_int()
    library.start(ctypes.byref(rank), ctypes.byref(size))
    atexit.register(library.stop)

    def bind(buffer: Array) -> tuple[Array, Callable[[], Any]]:
        data, count = ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(len(buffer))
        return buffer, lambda: library.all_reduce(data, count)

    return rank.value, size.value, bind


ENTRIES: dict[str, Callable[[dict[str, Any]], tuple[int, int, Bind]]] = {
    "mpi": _mpi,
    "gloo": _group("gloo"),
    "dist_prims": _group("dist_prims"),
    "direct": _group("dist_prims", direct=True),
    "zero_copy": _group("dist_prims", direct=True, shared=True),
    "deepspeed": _deepspeed,
    "oneccl": _oneccl,
}


def main(path: str) -> None:
    orders = json.loads(Path(path).read_text())
    faulthandler.dump_traceback_later(orders["seconds"], exit=True)  # also ends a loop in C++
    rank, size, bind = ENTRIES[orders["entry"]](orders)
    assert size == orders["ranks"], f"{size} ranks, asked for {orders['ranks']}"
    place = Path(orders["place"])
    barrier = SharedMemoryBarrier(place / "page", rank, size, orders["seconds"])
    barrier()
    with (place / f"rank-{rank}.jsonl").open("w") as file:
        for nbytes in map(int, orders["iterations"]):
            print(json.dumps(measure(bind, nbytes, rank, size, barrier, orders)), file=file, flush=True)
    barrier()


def prepare(entry: str, home: Path) -> None:
    if entry == "deepspeed":  # otherwise it compiles its operator on first use
        import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder().load()
    if entry == "oneccl":
        source, lib = home / "all_reduce.cpp", home / "lib"
        source.write_text(_ONECCL)
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-I{home / 'include'}"]
        libraries = [f"-L{lib}", "-lccl", "-lmpi", f"-Wl,-rpath,{lib}"]
        subprocess.run(["g++", *flags, str(source), "-o", str(home / "all_reduce.so"), *libraries], check=True)


_ONECCL = """
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


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[2])
