"""A device for tests: torch's PrivateUse1 by the name "toy", in Python, with the kernels of the CPU.

Its memory is its own: an access outside of a kernel of the device ends the process by SIGSEGV.
"""

from __future__ import annotations

import ctypes
import mmap
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration, dlpack
from torch.utils._pytree import tree_map

from dist_prims.backend.compile_native import compiler

_setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
REASON = "" if _setup else "this torch has no devices in Python"
_BYTES = 1 << 28  # virtual; no memory is used twice
_CPU, _TOY = 1, 12  # kDLCPU and kDLExtDev
_STREAMS = """
    #include <c10/core/impl/DeviceGuardImplInterface.h>
    thread_local c10::StreamId current = 0;
    struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
        c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
        c10::Device getDevice() const override { return c10::Device(type(), 0); }
        c10::Stream getStream(c10::Device device) const noexcept override {
            return c10::Stream(c10::Stream::UNSAFE, device, current);
        }
        c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
            return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(current, stream.id()));
        }
    };
    C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
    extern "C" void set_stream(long stream) { current = stream; }
    extern "C" long get_stream() { return current; }
"""

copies: list[tuple[str, bool, int]] = []  # in this process: "toy to cpu", whether it was non-blocking, the stream
_libc = ctypes.CDLL(None)
_lock = threading.RLock()
_kernels = 0  # that run now
_used = 0  # bytes
streams: Any = None  # the library of compile_streams(), if it is loaded
_memory: torch.Tensor
_address: int
_libraries: tuple[torch.library.Library, ...]


def compile_streams(folder: Path) -> Path:
    """Compile what gives each thread a current stream of the device; for :func:`install`."""
    torch_folder, library = Path(torch.__file__).parent, folder / "streams.so"
    command = [*shlex.split(compiler()), "-std=c++20", "-shared", "-fPIC", "-xc++", "-", "-o", str(library)]
    links = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run([*command, *links], input=_STREAMS, text=True, check=True, timeout=300)
    return library


def install(streams_library: Path | None = None) -> None:
    """Make the device in this process, which keeps it; with streams, if ``compile_streams`` has made their library."""
    global _memory, _address, _libraries, streams
    _memory = torch.frombuffer(mmap.mmap(-1, _BYTES), dtype=torch.uint8)
    _address = _memory.data_ptr()
    assert _setup
    _setup("toy")
    streams = ctypes.CDLL(str(streams_library)) if streams_library else None
    _libraries = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries[0].impl("_copy_from", _copy_from, "PrivateUse1")
    _libraries[1].fallback(_run_on_cpu, "PrivateUse1")
    with _memory_access():
        pass  # from now on it cannot be accessed


@contextmanager
def _memory_access() -> Iterator[None]:
    global _kernels
    address, size = ctypes.c_void_p(_address), ctypes.c_size_t(_BYTES)
    with _lock:
        _kernels += 1
        assert _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    try:
        yield
    finally:
        with _lock:
            _kernels -= 1
            assert _kernels or _libc.mprotect(address, size, 0) == 0


def _as_on(kind: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that belongs to the other kind of device."""
    capsule = dlpack.to_dlpack(tensor.detach())
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = kind  # after the pointer to the data
    return torch._C._from_dlpack(capsule)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    stream = streams.get_stream() if streams else 0
    copies.append((f"{source.device.type} to {target.device.type}", non_blocking, stream))
    with _memory_access():
        source, written = (
            _as_on(_CPU, tensor) if tensor.device.type == "toy" else tensor for tensor in (source, target)
        )
        written.copy_(source)
    return target


def _run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any other kernel. A result that is a view of an argument shares its memory, also on the device."""
    originals = {}

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or value.device.type != "toy":
            return value
        host = _as_on(_CPU, value)
        originals[id(host)] = value, host
        return host

    def to_toy(value: Any) -> Any:
        global _used
        if not isinstance(value, torch.Tensor) or id(value) in originals:
            return originals.get(id(value), (value,))[0]
        if not _address <= value.data_ptr() < _address + _BYTES:
            size = value.untyped_storage().nbytes()
            with _lock:
                begin, _used = _used, _used + (size // 64 + 1) * 64
            memory = _memory[begin : begin + size].view(value.dtype)
            value = memory.as_strided(value.shape, value.stride()).copy_(value)
        return _as_on(_TOY, value)

    with _memory_access():
        return tree_map(to_toy, op(*tree_map(to_cpu, args), **tree_map(to_cpu, kwargs)))
