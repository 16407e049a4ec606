"""Functions of a notebook, a prompt or standard input: a fresh interpreter cannot import them, and gets their value."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from launching import clean, run

import dist_prims
from dist_prims.launch import RankFailedError
from dist_prims.launch.payload import Payload, packed, unpacked

CELLS = """
import torch, torch.distributed as dist, dist_prims
from dist_prims.launch import RankFailedError

offset = 10
class Pair:
    def __init__(self, left, right): self.left, self.right = left, right
class Unlucky(Exception): pass
def double(number): return 2 * number
def body(more):
    total = torch.tensor(double(dist.get_rank()) + offset)
    dist.all_reduce(total)
    return Pair(total.item(), more(1))
def fails(): raise Unlucky("on purpose")
def returns(size, total):
    found = dist_prims.spawn(body, size, (lambda number: number + offset,), timeout=60)
    assert [(type(each) is Pair, each.left, each.right) for each in found] == [(True, total, 11)] * size
def raises():
    try: dist_prims.spawn(fails, 1, timeout=60)
    except RankFailedError as failure: assert type(failure.__cause__) is Unlucky and "on purpose" in str(failure)
    else: raise AssertionError("no error")
"""
OF_FORKS = "returns(2, 22)\nraises()\n"
GROUP = "dist_prims.init('gloo')\n"  # from now on ranks are fresh interpreters
CASES = {
    "standard input": GROUP + "returns(2, 22)\n",
    "-c": OF_FORKS + GROUP + "returns(2, 22)\n",
    "-i": GROUP + "raises()\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES)
@pytest.mark.timeout(300)
def test_what_a_program_without_a_source_defines(how: str, tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text("print('ran')\n")  # with -i, run once, and not by the ranks
    program = CELLS + CASES[how] + "print('well', flush=True)\n"
    arguments = {"standard input": ["-"], "-c": ["-c", program], "-i": ["-i", str(tmp_path / "start.py")]}[how]
    text = None if how == "-c" else "exec(" + repr(program) + ")\n"
    done = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=280, check=False, env=clean()
    )
    wanted = [*(["ran"] if how == "-i" else []), "well"]
    assert done.stdout.split("\n")[:-1] == wanted, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_is_imported_by_name(tmp_path: Path) -> None:
    """As multiprocessing does: what it defines may hold what cannot travel."""
    program = tmp_path / "program.py"
    program.write_text("""
import threading, dist_prims
lock = threading.Lock()
def body(): return lock.locked()
if __name__ == "__main__":
    print(dist_prims.spawn(body, 2, start_method="spawn", timeout=60))
""")
    assert run([sys.executable, str(program)], timeout=200).stdout == "[False, False]\n"


def travels(payload: Payload) -> Payload:
    received: Payload = pickle.loads(pickle.dumps(payload))
    return received


def test_a_lambda_travels_by_value() -> None:
    more = 3
    fn, args = travels(Payload(lambda number: number + more, (4,))).open()
    assert fn(*args) == 7


def test_an_object_that_cannot_be_pickled_is_refused_at_once() -> None:
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"cannot pickle '_thread.lock' object. Remedy: create the object named here inside fn"
    ):
        dist_prims.spawn(lambda: lock.locked(), 1, start_method="spawn", timeout=60)


def test_a_module_that_a_rank_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_here")
    exec("def f(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "made_here", module)
    received = travels(Payload(module.f, ()))
    monkeypatch.delitem(sys.modules, "made_here")
    with pytest.raises(RuntimeError, match=r"No module named 'made_here'. Remedy: define it in a module"):
        received.open()


def test_results_travel_by_value_where_they_must() -> None:
    class Local:
        pass

    assert type(unpacked(packed(Local()))) is Local
    assert unpacked(packed(lambda: 5))() == 5
    assert dist_prims.spawn(lambda: lambda: 5, 1, timeout=60)[0]() == 5
    with pytest.raises(RankFailedError, match=r"cannot pickle '_thread.lock'"):
        dist_prims.spawn(threading.Lock, 1, timeout=60)


NOTEBOOK = """
import sys
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
try:
    def cell(code):
        said = {"stdout": "", "stderr": ""}
        def hook(message):
            content = message["content"]
            if message["msg_type"] == "stream": said[content["name"]] += content["text"]
        reply = client.execute_interactive(code, timeout=200, output_hook=hook)
        assert reply["content"]["status"] == "ok", reply["content"]
        return said["stdout"]
    cell("def f(word): print(word, 'from', dist.get_rank())\\nimport torch.distributed as dist, dist_prims")
    for group in (False, True):
        if group: cell("dist_prims.init('gloo')")
        assert sorted(cell("dist_prims.spawn(f, 2, ('hello',))").splitlines()) == [
            "[rank 0] hello from 0", "[rank 1] hello from 1"], group
        assert cell("print(dist_prims.spawn(lambda: dist.get_rank(), 2))") == "[0, 1]\\n"
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
print("well")
"""


@pytest.mark.long(minutes=2)
@pytest.mark.timeout(900)
def test_in_a_notebook(tmp_path: Path) -> None:
    """A real kernel of Jupyter, in an environment of its own above this one."""
    home = tmp_path / "jupyter"
    run([sys.executable, "-m", "venv", str(home)], timeout=200)
    python = str(home / "bin" / "python")
    pip = run([python, "-m", "pip", "install", "--quiet", "ipykernel", "jupyter_client"], timeout=400)
    assert pip.returncode == 0, pip.stderr
    site = next(home.glob("lib/python*/site-packages"))
    here = [path for path in sys.path if path.endswith("site-packages")]
    spec = importlib.util.find_spec("dist_prims")
    assert spec is not None
    assert spec.origin is not None
    (site / "the_environment_of_the_tests.pth").write_text("\n".join([*here, str(Path(spec.origin).parent.parent)]))
    run([python, "-m", "ipykernel", "install", "--prefix", str(home)], timeout=100)
    done = run([python, "-c", NOTEBOOK], clean(JUPYTER_PATH=str(home / "share" / "jupyter")), timeout=280)
    assert done.stdout == "well\n", done.stdout + done.stderr
