"""What travels between a process and the ranks that it spawns: the function and its arguments, results, errors.

A forked rank has the function already. A fresh interpreter is sent it, and pickle sends functions and classes as names
to import. What a notebook, a prompt or ``python -c`` has defined cannot be imported there, nor can a lambda: such
things travel by value (cloudpickle).
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

__all__ = ["Payload", "main_left_alone", "packed", "unpacked"]

_Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Payload:
    """The function and its arguments, on their way to a rank."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.by_name = _main_can_be_imported()
        self._call = fn, args

    def __reduce__(self) -> Any:
        return _Received, (_for_a_fresh_interpreter(self._call, self.by_name),)

    def open(self) -> _Call:
        return self._call


class _Received(Payload):
    """The same, in a fresh interpreter."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def open(self) -> _Call:
        try:
            call: _Call = pickle.loads(self._content)
        except (AttributeError, ImportError) as error:
            raise RuntimeError(
                f"spawn: a fresh interpreter cannot import what it was sent: {error}. Remedy: define it in a module "
                "that can be imported, or have the ranks forked (start_method='fork': no CUDA and no group in use)"
            ) from error
        return call


def _main_can_be_imported() -> bool:
    """Whether a fresh interpreter that runs our main module again, as multiprocessing does, finds there what is in it
    here: not where it is a notebook, a prompt or standard input."""
    main = sys.modules["__main__"]
    has_source = getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")
    return has_source and not (hasattr(sys, "ps1") or sys.flags.interactive or hasattr(builtins, "__IPYTHON__"))


@contextlib.contextmanager
def main_left_alone(alone: bool) -> Iterator[None]:
    """Meanwhile multiprocessing does not find the source of our main module: it would run it, or fail to find it."""
    names = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: names[name] for name in ("__spec__", "__file__") if alone and name in names}
    names.update(dict.fromkeys(before))
    try:
        yield
    finally:
        names.update(before)


def _for_a_fresh_interpreter(call: _Call, by_name: bool) -> bytes:
    try:
        if by_name:
            return bytes(ForkingPickler.dumps(call))
    except (AttributeError, TypeError, pickle.PicklingError):
        pass  # a lambda, for one; by value it may travel
    try:
        return _by_value(call)
    except Exception as error:
        raise TypeError(
            f"spawn: fn and args must travel to fresh interpreters, and do not: {error}. Remedy: make what is named "
            "here inside fn; or have the ranks forked, which need not be sent anything (start_method='fork', the "
            "default unless CUDA or a group is in use here; see torch.distributed.destroy_process_group)"
        ) from error


def _by_value(call: Any) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]  # only here: importing the package must stay cheap

    buffer = io.BytesIO()
    pickler = cloudpickle.Pickler(buffer)
    # Tensors in shared memory, locks and queues travel as multiprocessing and torch let them.
    pickler.dispatch_table = ChainMap(ForkingPickler._extra_reducers, pickler.dispatch_table)  # type: ignore[attr-defined]
    pickler.dump(call)
    return buffer.getvalue()


def packed(value: Any) -> bytes:
    """A result or an error on its way to the parent; by value what the parent cannot import."""
    try:
        return pickle.dumps(value)
    except (AttributeError, TypeError, pickle.PicklingError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content


def unpacked(content: bytes) -> Any:
    return pickle.loads(content)
