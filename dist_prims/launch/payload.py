"""Serialization between a process and the ranks that it spawns: function and arguments, results, errors.

A forked rank inherits the function. A fresh interpreter receives a pickle of it, which has functions and classes *by
name*, to be imported. Definitions of a notebook, a prompt or ``python -c`` cannot be imported there, and neither can a
lambda. The module sends them *by value*, with cloudpickle.
"""

import builtins
import contextlib
import io
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

__all__: list[str] = []

_Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Payload:
    """The function and its arguments. multiprocessing pickles the payload where ranks are fresh interpreters."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.by_name = _main_can_be_imported()  # whether a fresh interpreter imports the main module
        self._call = fn, args

    def __reduce__(self) -> Any:
        return _Received, (_pickled(self._call, self.by_name),)

    def open(self) -> _Call:
        """Return the function and its arguments, on the rank."""
        return self._call


class _Received(Payload):
    """A payload on the receiving side, in a fresh interpreter."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def open(self) -> _Call:
        try:
            call: _Call = pickle.loads(self._content)
        except (AttributeError, ImportError) as error:
            raise RuntimeError(
                f"spawn: a fresh interpreter cannot import the function or its arguments: {error}. Remedy: define "
                "it in a module that can be imported, or fork the ranks (start_method='fork', if neither CUDA nor a "
                "group is in use)"
            ) from error
        return call


def _main_can_be_imported() -> bool:
    """Whether a fresh interpreter, in which multiprocessing runs the main module again, finds its definitions.

    False for a notebook, a prompt or standard input.
    """
    main = sys.modules["__main__"]
    has_source = getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")
    return has_source and not (hasattr(sys, "ps1") or sys.flags.interactive or hasattr(builtins, "__IPYTHON__"))


@contextlib.contextmanager
def hidden_main(hide: bool) -> Iterator[None]:
    """Hide the source of the main module from multiprocessing, which would run the source again, or fail to find it."""
    names = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: names[name] for name in ("__spec__", "__file__") if hide and name in names}
    names.update(dict.fromkeys(before))
    try:
        yield
    finally:
        names.update(before)


def _pickled(call: _Call, by_name: bool) -> bytes:
    try:
        if by_name:
            return bytes(ForkingPickler.dumps(call))
    except (AttributeError, TypeError, pickle.PicklingError):
        pass  # a lambda, for example, has no name to import, and is sent by value below
    try:
        return _pickled_by_value(call)
    except Exception as error:
        raise TypeError(
            f"spawn: fn and args cannot be sent to fresh interpreters: {error}. Remedy: create the object named here "
            "inside fn; or fork the ranks, which inherit fn and args (start_method='fork', the default unless CUDA or "
            "a group is in use in this process; see torch.distributed.destroy_process_group)"
        ) from error


def _pickled_by_value(call: _Call) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]  # imported on demand: importing the package must stay cheap

    buffer = io.BytesIO()
    pickler = cloudpickle.Pickler(buffer)
    # Tensors in shared memory, locks and queues are sent as multiprocessing and torch define.
    pickler.dispatch_table = ChainMap(ForkingPickler._extra_reducers, pickler.dispatch_table)  # type: ignore[attr-defined]
    pickler.dump(call)
    return buffer.getvalue()


def packed(value: Any) -> bytes:
    """Serialize a result or an error for the parent; by value if the parent cannot import its type."""
    try:
        return pickle.dumps(value)
    except (AttributeError, TypeError, pickle.PicklingError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content


def unpacked(content: bytes) -> Any:
    return pickle.loads(content)
