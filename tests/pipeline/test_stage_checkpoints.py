"""Checkpoints of stages: any number loads into any other, and what is not whole is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.launch import RankFailedError
from dist_prims.training.pipeline.checkpoint import load_stages, save_stages
from dist_prims.training.pipeline.split_model import split


def a_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 4), nn.Linear(4, 2).double()
    )


def assert_alike(a: nn.Module, b: nn.Module) -> None:
    for (name, left), right in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


CUTS = {1: [5], 2: [3, 2], 3: [1, 2, 2], 4: [1, 1, 1, 2], 5: [1] * 5}


@pytest.mark.parametrize("saved", CUTS)
def test_any_number_of_stages_loads_into_any_other(saved: int, tmp_path: Path) -> None:
    model = a_net()
    model[1](torch.randn(7, 4))  # statistics that are not the first ones
    save_stages(tmp_path, split(model, saved, by=CUTS[saved]))
    assert len(list(tmp_path.iterdir())) == saved + 1
    whole = a_net()
    load_stages(tmp_path, whole)
    assert_alike(model, whole)
    for count, sizes in CUTS.items():
        again = a_net()
        stages = split(again, count, by=sizes)
        for stage in stages:
            load_stages(tmp_path, stage)  # as its own rank does
        assert_alike(model, again)
        another = a_net()
        load_stages(tmp_path, split(another, count, by=sizes))
        assert_alike(model, another)


def test_only_parts_that_are_needed_are_read(tmp_path: Path) -> None:
    model = a_net()
    save_stages(tmp_path, split(model, 2, by=[3, 2]))
    next(tmp_path.glob("stage-0-*")).write_bytes(b"damaged")
    load_stages(tmp_path, split(a_net(), 2, by=[3, 2])[1])


def test_views_are_saved_without_the_rest(tmp_path: Path) -> None:
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(torch.zeros(1 << 20)[:4].view(2, 2))
    save_stages(tmp_path, {0: linear})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000


def test_a_checkpoint_is_replaced_and_the_old_one_goes(tmp_path: Path) -> None:
    (tmp_path / "stage-notes.pt").write_text("not ours")
    old, new = a_net(), a_net()
    save_stages(tmp_path, split(old, 4, by=CUTS[4]))
    save_stages(tmp_path, split(new, 2, by=CUTS[2]))
    whole = a_net()
    load_stages(tmp_path, whole)
    assert_alike(new, whole)
    names = {file.name for file in tmp_path.iterdir()}
    assert len(names) == 4
    assert "stage-notes.pt" in names


def test_a_crash_between_parts_and_manifest_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = a_net()
    save_stages(tmp_path, split(old, 2, by=CUTS[2]))

    def crash(*args: Any) -> None:
        raise OSError("the disk is full, on purpose")

    with monkeypatch.context() as patched:
        patched.setattr("dist_prims.training.pipeline.checkpoint._write_manifest", crash)
        with pytest.raises(OSError, match="on purpose"):
            save_stages(tmp_path, split(a_net(), 2, by=CUTS[2]))
    whole = a_net()
    load_stages(tmp_path, whole)
    assert_alike(old, whole)
    assert not list(tmp_path.glob("*.tmp"))


def broken(folder: Path, how: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    how(manifest)
    file.write_text(json.dumps(manifest))


def test_damage_is_refused_by_name_and_nothing_is_loaded(tmp_path: Path) -> None:
    save_stages(tmp_path, split(a_net(), 2, by=CUTS[2]))
    model = a_net()
    before = copy.deepcopy(model)
    part = next(tmp_path.glob("stage-1-*"))
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{part.name}, the part of stage 1, is damaged: its SHA-256 is"):
        load_stages(tmp_path, model)
    part.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{part.name}, the part of stage 1, is missing"):
        load_stages(tmp_path, model)
    part.write_bytes(content)
    good = (tmp_path / "manifest.json").read_text()
    cases: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda m: m["parts"].pop(), r"2\.bias, 2\.weight, 3\.bias, 3\.weight are in no part"),
        (lambda m: m["parts"].append(m["parts"][0]), r"keys 0\.bias, 0\.weight, .* come more than once"),
        (lambda m: m["parts"][0].pop("keys"), r"is no manifest of stages: KeyError\('keys'\)"),
        (lambda m: m["parts"][0]["keys"].reverse(), "holds other keys than the manifest says"),
        (lambda m: m["parts"][0].update(file="../elsewhere"), "names files elsewhere"),
        (lambda m: m.update(format="other"), "is of another format"),
    ]
    for how, words in cases:
        broken(tmp_path, how)
        with pytest.raises(ValueError, match=words):
            load_stages(tmp_path, model)
        (tmp_path / "manifest.json").write_text(good)
    (tmp_path / "manifest.json").write_text(good[:50])
    with pytest.raises(ValueError, match="is no manifest of stages"):
        load_stages(tmp_path, model)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*manifest\.json"):
        load_stages(tmp_path, model)
    assert_alike(model, before)


def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save_stages(tmp_path, split(a_net(), 2, by=CUTS[2]))
    larger = nn.Sequential(*a_net(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"4\.bias, 4\.weight are in no part of the checkpoint"):
        load_stages(tmp_path, larger)
    with pytest.raises(ValueError, match=r"3\.bias, 3\.weight of the checkpoint are not in the module"):
        load_stages(tmp_path, nn.Sequential(*list(a_net())[:3]))
    other = a_net()
    other[3] = nn.Linear(4, 3)
    first = copy.deepcopy(other[0])
    with pytest.raises(ValueError, match=r"3\.weight is \(2, 4\) in the checkpoint and \(3, 4\) in the module"):
        load_stages(tmp_path, other)
    assert_alike(first, other[0])


def test_stages_that_are_missing_or_double_are_not_saved(tmp_path: Path) -> None:
    stages = split(a_net(), 3, by=CUTS[3])
    with pytest.raises(ValueError, match="1 of 3 stages were saved by no rank"):
        save_stages(tmp_path, [stages[0], stages[2]])
    with pytest.raises(ValueError, match="stages 0 come more than once"):
        save_stages(tmp_path, [stages[0], stages[0]])
    with pytest.raises(ValueError, match="keys bias, weight come more than once"):
        save_stages(tmp_path, {0: nn.Linear(2, 2), 1: nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="0 of 2 stages were saved by no rank"):
        save_stages(tmp_path, {1: nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="a Linear is no stage of split"):
        save_stages(tmp_path, [nn.Linear(2, 2)])  # type: ignore[list-item]
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(("size", "backend"), [(1, "dist_prims"), (2, "gloo"), (3, "dist_prims")])
def test_every_rank_saves_and_loads_its_own(size: int, backend: str, tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = a_net()
        mine = split(model, 5, by=CUTS[5])[rank::size]
        save_stages(tmp_path, mine)
        assert (tmp_path / "manifest.json").exists()  # when it returns, on any rank
        torch.manual_seed(rank + 1)
        other = a_net()
        stage = split(other, 5, by=CUTS[5])[-1 - rank]
        load_stages(tmp_path, stage)
        assert_alike(stage, split(model, 5, by=CUTS[5])[-1 - rank])

    dist_prims.spawn(body, size, timeout=60, backend=backend)
    whole = a_net()
    load_stages(tmp_path, whole)


def test_a_rank_that_cannot_save_fails_all(tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        stages = split(a_net(), 3, by=CUTS[3])
        folder = tmp_path / "file/below" if rank == 1 else tmp_path / "folder"
        (tmp_path / "file").touch()
        error: type[Exception] = OSError if rank == 1 else MismatchError
        words = "Not a directory" if rank == 1 else "save_stages: rank 1 failed: NotADirectoryError"
        with pytest.raises(error, match=words):
            save_stages(folder, stages[rank])
        with pytest.raises((ValueError, RuntimeError), match="stages 0 come more than once"):
            save_stages(tmp_path / "double", stages[0])
        assert not (tmp_path / "double/manifest.json").exists()
        subgroup = dist.new_group([0, 2])
        if rank != 1:
            two = split(a_net(), 2, by=CUTS[2])
            save_stages(tmp_path / "two", two[rank // 2], subgroup)

    dist_prims.spawn(body, 3, timeout=60)
    load_stages(tmp_path / "two", a_net())


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return Path("x")


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save_stages(tmp_path, {0: nn.Linear(2, 2)})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"'stage 0' holds a .*Path at \['_extra_state'\]; only tensors"):
        save_stages(tmp_path, {0: Extra(2, 2)})
    assert sorted(tmp_path.iterdir()) == before


def test_what_the_dead_have_left_goes_and_others_do_not_save(tmp_path: Path) -> None:
    (tmp_path / ".stage-1.999.tmp").write_bytes(b"half")
    (tmp_path / ".stage-notes.tmp").write_bytes(b"not ours")

    def body() -> None:
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="save_stages: rank 1 is not a member of the given group"):
                save_stages(tmp_path, {1: nn.Linear(2, 2)}, group)
        else:
            save_stages(tmp_path, {0: nn.Linear(2, 2)}, group)

    dist_prims.spawn(body, 2, timeout=60)
    left = sorted(file.name[:7] for file in tmp_path.iterdir())
    assert left == [".stage-", "manifes", "stage-0"]


def test_a_rank_that_dies_while_saving_is_named(tmp_path: Path) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            raise KeyError("on purpose")
        save_stages(tmp_path, split(a_net(), 2, by=CUTS[2])[0])

    with pytest.raises(RankFailedError, match="on purpose"):
        dist_prims.spawn(body, 2, timeout=60)
    assert not (tmp_path / "manifest.json").exists()
