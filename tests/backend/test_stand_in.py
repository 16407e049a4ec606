"""``DIST_PRIMS_AS=gloo``: a program that names gloo, or nothing, has groups of this backend, and reads "gloo"."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch.distributed as dist
from launching import clean, run

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed import get_backend, init_process_group, new_group  # as programs import them
from torch.distributed.device_mesh import init_device_mesh

def native(group):
    return type(group._get_backend(torch.device("cpu"))).__name__

arguments, options = json.loads(sys.argv[1])
init_process_group(*arguments, **options)
ones = torch.ones(3)
dist.all_reduce(ones)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
groups = [dist.group.WORLD, new_group([0, 1]), new_group(backend="gloo"), new_group([0, 1], None, "gloo"),
          dist.new_subgroups(2)[0], mesh.get_group("b")]
print(json.dumps({
    "native": sorted({native(group) for group in groups}),
    "names": sorted({get_backend(group) for group in groups}),
    "config": dist.get_backend_config(),
    "default": dist.get_default_backend_for_device("cpu"),
    "sum": ones.tolist(),
}))
if arguments:  # what looks for a group of this backend finds one
    import dist_prims
    dist_prims.shrink(timeout=30)
"""
OURS = '"native": ["PrimsBackend"]'


def results(tmp_path: Path, call: str, **environ: str) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "program.py", call], clean(**environ), timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ['[["gloo"], {}]', '[[], {"backend": "cpu:gloo"}]', "[[], {}]"])
def test_a_name_of_gloo_or_none_makes_groups_of_this_backend(call: str, tmp_path: Path) -> None:
    out = results(tmp_path, call, DIST_PRIMS_AS="gloo")
    assert out.count(OURS) == 2, out
    assert out.count('"sum": [2.0, 2.0, 2.0]') == 2
    assert "dist_prims" not in out.replace('"default": "dist_prims"', "")


def test_another_name_has_no_effect() -> None:
    done = run([sys.executable, "-c", "import torch"], clean(DIST_PRIMS_AS="nccl"))
    assert done.stderr == "dist_prims: DIST_PRIMS_AS=nccl has no effect; it can be 'gloo'\n"


def test_a_program_with_ignite_is_warned_that_gradients_are_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ignite.distributed", types.ModuleType("ignite.distributed"))
    store = dist.HashStore()
    with pytest.warns(UserWarning, match="Ignite does not know .* ranks train apart. Set DIST_PRIMS_AS=gloo"):
        dist.init_process_group("dist_prims", store=store, rank=0, world_size=1)
    dist.destroy_process_group()
