"""Streams over ranks and workers, resumed anywhere; and the archives that they may come from."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import tarfile
import traceback
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import dist_prims
from dist_prims.training.data import ShardedIterable, TarError, tar_members, tar_samples


def shards_of(lengths: list[int]) -> list[list[tuple[int, int]]]:
    return [[(shard, item) for item in range(length)] for shard, length in enumerate(lengths)]


def ranks_of(sources: list[Any], size: int, **options: Any) -> list[ShardedIterable]:
    return [ShardedIterable(sources, rank=rank, size=size, **options) for rank in range(size)]


lengths = st.lists(st.integers(0, 12), max_size=9)
buffers = st.sampled_from([0, 1, 3, 100])


@settings(deadline=None)
@given(lengths=lengths, size=st.integers(1, 7), buffer=buffers, epoch=st.integers(0, 3), shuffle=st.booleans())
def test_each_sample_once(lengths: list[int], size: int, buffer: int, epoch: int, shuffle: bool) -> None:
    sources = shards_of(lengths)
    ranks = ranks_of(sources, size, shuffle_buffer=buffer, shuffle=shuffle)
    for rank in ranks:
        rank.set_epoch(epoch)
    assert sorted(chain(*ranks)) == sorted(chain(*sources))


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths,
    buffer=buffers,
    changes=st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=5, max_size=5)), max_size=4),
    last=st.integers(1, 5),
)
def test_changes_of_size_within_an_epoch(lengths: list[int], buffer: int, changes: list[Any], last: int) -> None:
    """Some batches on each rank, as many as it likes; then other ranks go on from all their states."""
    sources = shards_of(lengths)
    seen: list[Any] = []
    state: Any = None
    for size, batches in [*changes, (last, [99] * 5)]:
        ranks = ranks_of(sources, size, shuffle_buffer=buffer, seed=5)
        for rank, take in zip(ranks, batches, strict=False):
            rank.set_epoch(2)
            if state is not None:
                rank.load_state_dict(state)
            seen += chain(*islice(rank.batches(3, collate=list), take))
        state = [rank.state_dict() for rank in ranks]
    assert sorted(seen) == sorted(chain(*sources))


def test_the_rest_is_what_would_have_come() -> None:
    sources = shards_of([30, 20, 10])
    whole = [*chain(*ShardedIterable(sources, rank=0, size=1, shuffle_buffer=8).batches(7, collate=list))]
    data = ShardedIterable(sources, rank=0, size=1, shuffle_buffer=8)
    start = [*chain(*islice(data.batches(7, collate=list), 4))]
    later = ShardedIterable(sources, rank=0, size=1, shuffle_buffer=8)
    later.load_state_dict(data.state_dict())
    assert [*start, *chain(*later.batches(7, collate=list))] == whole
    assert [*start, *chain(*data.batches(7, collate=list))] == whole  # and in the process that stopped


def test_the_order_is_mixed_and_new_each_epoch() -> None:
    sources = shards_of([50, 50, 50])
    data = ShardedIterable(sources, rank=0, size=1, shuffle_buffer=40)
    first = list(data)
    data.set_epoch(1)
    assert first != list(data)
    assert len({shard for shard, _ in first[:60]}) > 1
    plain = ShardedIterable(sources, rank=0, size=1, shuffle=False)
    assert list(plain) == [*chain(*sources)]


def test_workers_that_read_ahead_and_a_change_of_workers() -> None:
    sources = shards_of([40, 3, 17, 0, 9])
    ranks = ranks_of(sources, 2, shuffle_buffer=5)
    seen = [*chain(*(islice(rank.batches(4, workers=2, collate=list), 3) for rank in ranks))]
    assert 0 < len([*chain(*seen)]) < 69
    state = [rank.state_dict() for rank in ranks]
    alone = ShardedIterable(sources, rank=0, size=1, shuffle_buffer=5)
    alone.load_state_dict(state)
    seen += alone.batches(4, workers=2, collate=list)
    assert sorted(chain(*seen)) == sorted(chain(*sources))
    with pytest.raises(ValueError, match="began epoch 0 with 2 workers and continues with 1"):
        list(ranks[0])


def test_workers_that_live_on_are_refused() -> None:
    """They gave the first epoch's order again, and after a resume left out again what had been given before it."""
    data = ShardedIterable(shards_of([8, 8]), rank=0, size=1)
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 16
    data.set_epoch(1)
    with pytest.raises(ValueError, match=r"epoch 0 again: set_epoch\(\) does not reach") as first:
        list(loader)
    fresh = DataLoader(data, batch_size=None, num_workers=1, collate_fn=tuple)
    assert list(fresh) == list(data) == list(fresh)
    in_order = ShardedIterable(shards_of([8]), rank=0, size=1, shuffle=False)  # the same in each epoch: no harm
    loader = DataLoader(in_order, batch_size=None, num_workers=1, persistent_workers=True)
    assert list(loader) == list(loader)
    in_order.load_state_dict({**in_order.state_dict(), "given": [3]})
    loader = DataLoader(in_order, batch_size=None, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 5
    with pytest.raises(ValueError, match="epoch 0 again") as second:
        list(loader)
    # The errors hold iterators, and these the workers. A worker whose iterator the garbage collector finds gets no
    # message, because its queue is gone: torch waits 5 seconds for it.
    for error in (first, second):
        traceback.clear_frames(error.value.__traceback__)
    del loader
    assert not multiprocessing.active_children()


def test_the_group_says_rank_and_size() -> None:
    sources = shards_of([5, 7])
    parts = dist_prims.spawn(lambda: list(ShardedIterable(sources)), 3, timeout=60)
    assert sorted(chain(*parts)) == sorted(chain(*sources))


def test_states_that_do_not_fit_are_refused() -> None:
    data = ShardedIterable([range(3)], rank=0, size=1)
    one, two = (each.state_dict() for each in ranks_of([range(3)], 2))
    with pytest.raises(ValueError, match=r"of ranks \[0\]; give a list of the states of all ranks"):
        data.load_state_dict(one)
    with pytest.raises(ValueError, match="with seed=1, and has 0"):
        data.load_state_dict([one, {**two, "seed": 1}])
    with pytest.raises(ValueError, match="differ in epoch: 0 and 1"):
        data.load_state_dict([one, {**two, "epoch": 1}])
    with pytest.raises(ValueError, match=r"had \[1, 2\] workers"):
        data.load_state_dict([{**one, "given": [1]}, {**two, "given": [1, 1]}])
    with pytest.raises(ValueError, match="shuffle_buffer=-1"):
        ShardedIterable([], rank=0, size=1, shuffle_buffer=-1)


def pack(path: Path, members: dict[str, bytes], form: int = tarfile.GNU_FORMAT, mode: Any = "w") -> Path:
    with tarfile.open(path, mode, format=form) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


MEMBERS = {"a/1.txt": b"one", "a/1.x.bin": bytes(1000), "b/1.txt": b"", "readme": b"x" * 512, "ö" * 90 + ".txt": b"two"}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_members_of_every_form(tmp_path: Path, form: int, mode: str) -> None:
    path = pack(tmp_path / "a.tar", {**MEMBERS, "d/" * 100 + "deep.txt": b"deep"}, form, mode)
    assert dict(tar_members(path)) == {**MEMBERS, "d/" * 100 + "deep.txt": b"deep"}
    long = "folder/" * 20 + "name.txt"  # in two fields of the header
    assert dict(tar_members(pack(tmp_path / "u.tar", {long: b"1"}, tarfile.USTAR_FORMAT))) == {long: b"1"}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.one_of(st.integers(0, 3000), st.sampled_from([512, 1024, 10240])), max_size=8),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_what_tarfile_writes_is_read(tmp_path: Path, sizes: list[int], form: int) -> None:
    members = {f"{number}.bin": os.urandom(size) for number, size in enumerate(sizes)}
    assert dict(tar_members(pack(tmp_path / "a.tar", members, form))) == members


def test_samples_are_neighbours_of_one_name(tmp_path: Path) -> None:
    samples = list(tar_samples(pack(tmp_path / "a.tar", MEMBERS), {"txt": bytes.decode, "bin": len}))
    assert samples == [
        {"__key__": "a/1", "txt": "one", "x.bin": 1000},
        {"__key__": "b/1", "txt": ""},
        {"__key__": "readme", "": b"x" * 512},
        {"__key__": "ö" * 90, "txt": "two"},
    ]
    with pytest.raises(TarError, match=r"member 'a/1.txt' cannot be decoded: ValueError"):
        list(tar_samples(tmp_path / "a.tar", {"txt": int}))
    twice = pack(tmp_path / "b.tar", {"a.txt": b"", "./a.txt": b""})
    with pytest.raises(TarError, match=r"sample 'a' already has a field 'txt'"):
        list(tar_samples(twice))


def test_archives_over_ranks_and_workers(tmp_path: Path) -> None:
    paths = [pack(tmp_path / f"{n}.tar", {f"{n}-{m}.txt": b"" for m in range(7)}) for n in range(3)]
    ranks = ranks_of(paths, 2, open=tar_samples)
    keys = [
        sample["__key__"] for rank in ranks for batch in rank.batches(2, workers=2, collate=list) for sample in batch
    ]
    assert sorted(keys) == [f"{n}-{m}" for n in range(3) for m in range(7)]


def test_directories_and_pipes(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("./folder")
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
        archive.addfile(tarfile.TarInfo("./folder/x.txt"))
    assert list(tar_members(tmp_path / "a.tar")) == [("folder/x.txt", b"")]
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb") as end:
        end.write((tmp_path / "a.tar").read_bytes())
        end.close()
        assert list(tar_members(f"/dev/fd/{reading}")) == [("folder/x.txt", b"")]


@pytest.mark.parametrize(
    "name", ["/etc/x.txt", "../x.txt", "a/../../x.txt", "./..", "/" + "a" * 200, ".//../x.txt", "././/./.."]
)
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_that_point_outside_the_archive_are_refused(tmp_path: Path, name: str, form: int) -> None:
    with pytest.raises(TarError, match="leads out of the archive"):
        list(tar_members(pack(tmp_path / "a.tar", {"good.txt": b"", name: b""}, form)))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_that_begin_with_the_folder_they_are_in(tmp_path: Path, form: int) -> None:
    """Its "./" was taken away after the check: ".//etc/passwd" came out as "/etc/passwd", a file "./" with no name."""
    names = {".//etc/passwd": b"1", "././/b.txt": b"2", "./": b"", ".//": b"", "./.hidden": b"3", "a/./c": b"4"}
    path = pack(tmp_path / "a.tar", names, form)
    assert list(tar_members(path)) == [("etc/passwd", b"1"), ("b.txt", b"2"), (".hidden", b"3"), ("a/./c", b"4")]
    with tarfile.open(tmp_path / "b.tar", "w", format=form) as archive:
        for name in ("./", "."):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
    assert list(tar_members(tmp_path / "b.tar")) == []


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z"])
@pytest.mark.parametrize("target", ["x", "t" * 200])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: bytes, target: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("bad.txt")
        member.type, member.linkname = kind, target
        archive.addfile(member)
    with pytest.raises(TarError, match=r"member 'bad.txt' is .*; only files and directories"):
        list(tar_members(tmp_path / "a.tar"))


def test_pax_records_that_cannot_be_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("sparse.bin")
        member.pax_headers = {"GNU.sparse.major": "1"}
        archive.addfile(member)
    with pytest.raises(TarError, match=r"pax record 'GNU.sparse.major'"):
        list(tar_members(tmp_path / "a.tar"))


@pytest.mark.parametrize("packed", [False, True])
def test_every_truncation_is_seen(tmp_path: Path, packed: bool) -> None:
    whole = pack(tmp_path / "a.tar", {"a.bin": os.urandom(700), "b.bin": os.urandom(20)}).read_bytes()
    whole = gzip.compress(whole[:3072]) if packed else whole[: 512 + 1024 + 512 + 512 + 512]  # and one block of the end
    path = tmp_path / "cut.tar"
    path.write_bytes(whole)
    assert len(list(tar_members(path))) == 2
    for end in {*range(0, len(whole), 97), *range(0, len(whole), 512), len(whole) - 1}:
        path.write_bytes(whole[:end])
        with pytest.raises(TarError, match="ends early"):
            list(tar_members(path))


def test_damage_is_seen(tmp_path: Path) -> None:
    whole = pack(tmp_path / "a.tar", {"a.bin": b"12345"}).read_bytes()
    path = tmp_path / "bad.tar"
    for place in [*range(0, 148), *range(156, 512)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(TarError, match="checksum is wrong"):
            list(tar_members(path))
    for number in (b"-0000000005\0", b"0o000000005\0", b"00_00000005\0", b"\xff" * 12):
        header = bytearray(whole[:512])
        header[124:136] = number
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        path.write_bytes(bytes(header) + whole[512:])
        with pytest.raises(TarError, match="for a number"):
            list(tar_members(path))
    path.write_bytes(whole + whole)
    with pytest.raises(TarError, match="data after the end mark"):
        list(tar_members(path))
    path.write_bytes(gzip.compress(whole)[:-8] + bytes(8))
    with pytest.raises(TarError, match="damaged or ends early"):
        list(tar_members(path))


def test_an_archive_above_a_limit_is_refused(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar", {"a.bin": bytes(10), "b.bin": bytes(20)})
    assert len(list(tar_samples(path, max_member_bytes=20, max_total_bytes=30, max_members=2))) == 2
    for option, limit, value in (("max_member_bytes", 19, 20), ("max_total_bytes", 29, 30), ("max_members", 1, 2)):
        with pytest.raises(TarError, match=f"member 'b.bin' makes {value}, over {option}={limit}"):
            list(tar_samples(path, **{option: limit}))  # type: ignore[arg-type]
