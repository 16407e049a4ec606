"""MSCCL algorithms: what is proved runs in every order, and what is refused fails in some order.

``Machine`` is the independent check. It reads the XML by itself and executes one chunk of a step of a thread block at a
time, in a random order.
"""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from buffer_memory import BufferMemory, Value, WrongError, check_mutants, last, verdict

from dist_prims.cli.main import main
from dist_prims.schedules import Graph, Schedule, algorithms, build, synthesize
from dist_prims.schedules.contract import contract
from dist_prims.schedules.steps import Step, Steps

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Machine(BufferMemory):
    """The GPUs of an MSCCL algorithm, with their thread blocks, connections and memory."""

    def __init__(self, text: str) -> None:
        root = ElementTree.fromstring(text)
        self.gpus = sorted(root.findall("gpu"), key=lambda gpu: int(gpu.attrib["id"]))
        super().__init__(
            root.attrib["coll"].replace("_", ""),
            int(root.attrib["nchunksperloop"]),
            root.attrib["inplace"] == "1",
            [int(gpu.attrib["s_chunks"]) for gpu in self.gpus],
        )
        self.slots = 2 if root.attrib["proto"] == "Simple" else 8
        self.blocks = [{int(tb.attrib["id"]): tb for tb in gpu.findall("tb")} for gpu in self.gpus]

    def run(self, choose: Callable[[list[str]], str]) -> tuple[bool, list[str]]:
        """Whether all ranks end with the right result, and the chunks of the steps in the order in which they ran."""
        self.memory, self.failed = [self.start(rank) for rank in range(self.size)], False
        self.flags = [dict.fromkeys(blocks, -1) for blocks in self.blocks]
        self.sent: dict[tuple[int, int, str], deque[tuple[str, Value]]] = defaultdict(deque)
        self.owners: dict[tuple[str, int, int, str], int] = {}
        parts = {(rank, tb): list(self.parts(each)) for rank, own in enumerate(self.blocks) for tb, each in own.items()}
        at = dict.fromkeys(parts, 0)
        done: list[str] = []
        while True:
            next_parts = {key: parts[key][number] for key, number in at.items() if number < len(parts[key])}
            ready = {self.name(*key, *part): key for key, part in next_parts.items() if self.is_ready(*key, part[0])}
            if not ready:
                break
            name = choose(list(ready))
            rank, tb = ready[name]
            self.execute(rank, tb, *next_parts[rank, tb])
            at[rank, tb] += 1
            done.append(name)
        if next_parts or any(self.sent.values()):
            return False, [*done, "stuck"]
        is_right = all(self.memory[rank].items() >= self.result(rank).items() for rank in range(self.size))
        return is_right and not self.failed, done

    def parts(self, block: ElementTree.Element) -> Iterator[tuple[int, int]]:
        """The steps of a thread block and their chunks, which a runtime moves one by one if they are large."""
        for number, each in enumerate(block.findall("step")):
            for chunk in range(max(1, int(each.attrib["cnt"])) if each.attrib["type"] != "nop" else 1):
                yield number, chunk

    def name(self, rank: int, tb: int, step: int, chunk: int) -> str:
        element = self.blocks[rank][tb].findall("step")[step]
        is_one = element.attrib["cnt"] == "1" or element.attrib["type"] == "nop"
        part = "" if is_one else f", chunk {chunk}"
        return f"rank {rank}, thread block {tb}, step {step}{part} ({element.attrib['type']})"

    def connection(self, rank: int, tb: int, side: str) -> deque[tuple[str, Value]]:
        peer, channel = int(self.blocks[rank][tb].attrib[side]), self.blocks[rank][tb].attrib["chan"]
        if peer == rank or not 0 <= peer < self.size or self.owners.setdefault((side, rank, peer, channel), tb) != tb:
            raise WrongError(f"{side}={peer}")
        return self.sent[(rank, peer, channel) if side == "send" else (peer, rank, channel)]

    def is_ready(self, rank: int, tb: int, step: int) -> bool:
        steps = self.blocks[rank][tb].findall("step")
        kind, other, needed = steps[step].attrib["type"], *(int(steps[step].attrib[name]) for name in ("depid", "deps"))
        if other >= 0 > needed:
            raise WrongError(f"deps={needed}")
        if other >= 0 and self.flags[rank].get(other, -1) < needed:
            return False
        if kind in ("r", "rcs", "rrc", "rrs", "rrcs") and not self.connection(rank, tb, "recv"):
            return False
        return kind not in ("s", "rcs", "rrs", "rrcs") or len(self.connection(rank, tb, "send")) < self.slots

    def execute(self, rank: int, tb: int, number: int, chunk: int) -> None:
        step = self.blocks[rank][tb].findall("step")[number]
        kind, memory, count = step.attrib["type"], self.memory[rank], range(int(step.attrib["cnt"]))
        if kind != "nop":
            src, dst = (
                [self.place(rank, step.attrib[f"{end}buf"], int(step.attrib[f"{end}off"]) + each) for each in count]
                if kind not in unused
                else []
                for end, unused in (("src", ("r", "rcs")), ("dst", ("s", "rrs")))
            )
            if not count or (src and dst and src != dst and set(src) & set(dst)):
                raise WrongError("overlap")
            if kind == "re" and self.is_fused_wrongly(rank, tb, number):
                raise WrongError("fused")
            src, dst = src[chunk : chunk + 1], dst[chunk : chunk + 1]
            received: list[Value] = []
            part = f"{chunk} of {len(count)}"
            if kind in ("r", "rcs", "rrc", "rrs", "rrcs"):
                sent, value = self.connection(rank, tb, "recv").popleft()
                received = [value]
                if sent != part:
                    raise WrongError("count")
            self.failed |= any(place not in memory for place in [*src, *(dst if kind == "re" else [])])
            values = [memory.get(place, (-1, ())) for place in src] or received
            if kind in ("rrc", "rrs", "rrcs"):
                values = [self.sum_of(one, two) for one, two in zip(values, received, strict=True)]
            if kind == "re":
                values = [self.sum_of(memory.get(at, (-1, ())), value) for at, value in zip(dst, values, strict=True)]
            memory.update(zip(dst, values, strict=False))
            if kind in ("s", "rcs", "rrs", "rrcs"):
                self.connection(rank, tb, "send").append((part, values[0]))
        if step.attrib["hasdep"] == "1" and kind != "nop" and chunk == count[-1]:
            self.flags[rank][tb] = int(step.attrib["s"])

    def is_fused_wrongly(self, rank: int, tb: int, number: int) -> bool:
        """Whether a runtime does a sum together with the one before it, which has another count."""
        own, *earlier = self.blocks[rank][tb].findall("step")[number::-1]
        before = next((each for each in earlier if each.attrib["type"] != "nop"), own).attrib
        names = ("type", "srcbuf", "dstbuf", "dstoff")
        is_fused = [before[name] for name in names] == [own.attrib[name] for name in names]
        is_fused &= before["hasdep"] == "0" and own.attrib["depid"] == "-1"
        return is_fused and before["cnt"] != own.attrib["cnt"]


def machine_agrees(text: str, error: str, chance: random.Random) -> bool:
    """Whether the machine finds what the verdict says: a right result in every order, or the failure."""
    try:
        machine = Machine(text)
        if race := re.match(r"race: (.*?\)) \w+ .*? of rank \d+; (.*?\)) ", error):
            # Either of the two comes first, if the other one waits as long as it can.
            orders = []
            for late in race.groups():
                others = machine.run(last(late))[1]
                orders.append([each for each in others if each in race.groups()])
            return orders[0] == orders[1][::-1] and len(set(orders[0])) == 2
        runs = [machine.run(chance.choice) for _ in range(2 if error else 8)]
    except WrongError:
        return bool(error)
    if error.startswith("deadlock"):
        return all(done[-1:] == ["stuck"] for _, done in runs)
    return all(is_right == (not error) for is_right, _ in runs)


def step(
    number: int, kind: str, src: str = "i0", dst: str = "i0", dep: tuple[int, int] = (-1, -1), has: int = 0
) -> str:
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" dstoff="{dst[1:]}" '
        f'cnt="1" depid="{dep[0]}" deps="{dep[1]}" hasdep="{has}"/>'
    )


def algo(name: str, coll: str, chunks: int, blocks: list[list[str]], inplace: int, scratch: int = 0) -> str:
    gpus = "".join(
        f'<gpu id="{rank}" i_chunks="{chunks}" o_chunks="{chunks}" s_chunks="{scratch}">{"".join(texts)}</gpu>'
        for rank, texts in enumerate(blocks)
    )
    return (
        f'<algo name="{name}" proto="LL" nchannels="1" nchunksperloop="{chunks}" ngpus="{len(blocks)}" coll="{coll}" '
        f'inplace="{inplace}">{gpus}</algo>'
    )


def fused_ring(size: int, inplace: int, count: int = 1) -> str:
    """A ring all_reduce with one thread block a rank that receives, adds and sends in one step."""
    blocks = []
    for rank in range(size):
        own = [(rank - step) % size * count for step in range(2 * size - 1)]
        kinds = ["s", *["rrs"] * (size - 2), "rrcs", *["rcs"] * (size - 2), "r"]
        steps = [step(at, kind, f"i{own[at]}", f"o{own[at]}") for at, kind in enumerate(kinds)]
        text = "".join(steps).replace('cnt="1"', f'cnt="{count}"')
        send, receive = (rank + 1) % size, (rank - 1) % size
        blocks.append([f'<tb id="0" send="{send}" recv="{receive}" chan="0">{text}</tb>'])
    return algo("fused_ring", "allreduce", size * count, blocks, inplace)


def one_shot(size: int) -> str:
    """Each rank receives the data of all others in scratch, one thread block a peer, and the first adds it up."""
    blocks = []
    for rank in range(size):
        peers = [peer for peer in range(size) if peer != rank]
        texts = []
        for tb, peer in enumerate(peers):
            steps = [step(0, "s", "i0", "s0"), step(1, "r", "i0", f"s{peer}", has=1)]
            if tb == 0:
                steps += [step(1 + other, "nop", dep=(other, 1)) for other in range(1, len(peers))]
                steps += [step(len(steps) + at, "re", f"s{each}", "i0") for at, each in enumerate(peers)]
            texts.append(f'<tb id="{tb}" send="{peer}" recv="{peer}" chan="0">{"".join(steps)}</tb>')
        blocks.append(texts)
    return algo("one_shot", "allreduce", 1, blocks, 1, size)


def exchange(chunks: int, order: int = 1) -> Schedule:
    """Two ranks that add the data of each other in one step; with order=-1 the last chunk goes first."""
    data = range(chunks)[::order]
    src, dst = [0] * chunks + [1] * chunks, [1] * chunks + [0] * chunks
    steps = (Step(src, dst, [*range(chunks)] * 2, [True] * 2 * chunks, [*data] * 2),)
    own = contract("all_reduce", 2, chunks)
    return Schedule("all_reduce", "exchange", 2, chunks, own, Steps(lambda: iter(steps), 1))


def exported(collective: str, name: str, size: int, folder: Path) -> str:
    return build(collective, name, size).save(folder / "one.xml", "msccl").read_text()


BASES: dict[str, Callable[[Path], str]] = {
    "fused ring in place": lambda _: fused_ring(3, 1),
    "fused ring": lambda _: fused_ring(4, 0),
    "one shot": lambda _: one_shot(4),
    "recursive doubling": lambda folder: exported("all_reduce", "recursive_doubling", 4, folder),
    "direct": lambda folder: exported("reduce_scatter", "direct", 3, folder),
    "bruck": lambda folder: exported("all_to_all", "bruck", 4, folder),
    "all_gather": lambda folder: exported("all_gather", "ring", 4, folder),
    "exchange": lambda folder: exchange(4).save(folder / "one.xml", "msccl").read_text(),
    "fused ring of two chunks": lambda _: fused_ring(3, 0, 2),
    "hierarchical": lambda folder: exported("all_reduce", "hierarchical", 4, folder),
}


@pytest.mark.parametrize("base", BASES)
def test_an_algorithm_is_proved_and_runs_in_random_orders(base: str, tmp_path: Path) -> None:
    text = BASES[base](tmp_path)
    assert not verdict(text, tmp_path / "two.xml")
    machine = Machine(text)
    assert all(machine.run(random.Random(seed).choice)[0] for seed in range(20))


def mutant(text: str, chance: random.Random) -> str:
    """The algorithm with one mistake."""
    root = ElementTree.fromstring(text)
    blocks = [tb for tb in root.iter("tb") if len(tb)]
    tb = chance.choice(blocks)
    at = chance.randrange(len(tb))
    kind = chance.randrange(7)
    if kind == 0:
        name = chance.choice(["srcoff", "dstoff", "cnt", "deps", "depid"])
        tb[at].set(name, str(int(tb[at].attrib[name]) + chance.choice([-1, 1])))
    elif kind == 1:
        tb[at].set("type", chance.choice(["s", "r", "rcs", "rrc", "rrs", "rrcs", "cpy", "re", "nop"]))
    elif kind == 2:
        tb[at].set(chance.choice(["srcbuf", "dstbuf"]), chance.choice("ios"))
    elif kind == 3:
        waiting = [each for each in root.iter("step") if each.attrib["depid"] != "-1"]
        chance.choice(waiting or [tb[at]]).set("depid", "-1")
    elif kind == 4:
        announcing = [each for each in root.iter("step") if each.attrib["hasdep"] == "1"]
        chance.choice(announcing or [tb[at]]).set("hasdep", "0")
    elif kind == 5:
        moved = tb[at]
        tb.remove(moved)
        if chance.random() < 0.7:
            tb.insert(chance.randrange(len(tb) + 1), moved)
    else:
        tb.set(chance.choice(["send", "recv"]), str(chance.randrange(len(root.findall("gpu")))))
    for number, each in enumerate(tb):
        each.set("s", str(number))
    return ElementTree.tostring(root, encoding="unicode")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("base", BASES)
def test_mutants_are_refused_or_right(base: str, tmp_path: Path) -> None:
    """125 algorithms with one mistake for each base: 1,250 together."""
    check_mutants(BASES[base](tmp_path), mutant, machine_agrees, random.Random(base), tmp_path / "two.xml")


def has_results_of(found: Schedule, schedule: Schedule) -> bool:
    """Whether a schedule that was read gives what the saved one gives."""
    inputs = [np.arange(len(schedule.contract.start(rank).chunk)) + 100 * rank for rank in range(schedule.size)]
    results = zip(found.simulate(inputs), schedule.simulate(inputs), strict=True)
    return all(np.array_equal(one, two) for one, two in results)


@pytest.mark.parametrize("kind", ["msccl", "mscclpp"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_exported_schedule_is_read_again(collective: str, kind: str, tmp_path: Path) -> None:
    for name in algorithms(collective):
        for size in (1, 2, 3, 5, 8):
            schedule = build(collective, name, size)
            text = schedule.save(tmp_path / "one", kind).read_text()
            found = Schedule.load(tmp_path / "one")
            assert has_results_of(found, schedule), (name, size)
            assert found.contract.same_bits or not schedule.contract.same_bits
            # The sums in one step of the direct all_reduce become several steps.
            if kind == "msccl" and (collective, name) != ("all_reduce", "direct"):
                assert found.save(tmp_path / "two", kind).read_text() == text


def test_a_collective_that_the_format_lacks_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broadcast: only all_reduce, all_gather"):
        build("broadcast", "binomial", 4).save(tmp_path / "one.xml", "msccl")
    with pytest.raises(ValueError, match="format='xml': it must be None or one of msccl"):
        build("all_reduce", "ring", 4).save(tmp_path / "one.xml", "xml")


def test_a_sent_chunk_may_be_overwritten_before_it_is_received(tmp_path: Path) -> None:
    """The first design read a sent chunk when it was received. Here rank 0 has replaced it by then."""
    steps = [
        [step(0, "s"), step(1, "rrc")],
        [
            step(0, "s"),
            step(1, "cpy", "i0", "s0"),
            step(2, "cpy", "s0", "s1"),
            step(3, "r", dst="s2"),
            step(4, "re", "s2"),
        ],
    ]
    blocks = [
        [f'<tb id="0" send="{1 - rank}" recv="{1 - rank}" chan="0">{"".join(steps[rank])}</tb>'] for rank in (0, 1)
    ]
    text = algo("late", "allreduce", 1, blocks, 1, 3)
    assert not verdict(text, tmp_path / "one.xml")
    assert machine_agrees(text, "", random.Random(0))
    late = Schedule.load(tmp_path / "one.xml")
    assert sorted(late.steps[0].rows()) == [(0, 0, 0, 4, False), (1, 0, 0, 0, True), (1, 1, 0, 1, False)]


def test_ranks_that_add_in_different_orders_are_proved_without_equal_bits(tmp_path: Path) -> None:
    assert not verdict(one_shot(4), tmp_path / "one.xml")
    assert not Schedule.load(tmp_path / "one.xml").contract.same_bits
    assert not verdict(fused_ring(4, 1), tmp_path / "one.xml")
    assert Schedule.load(tmp_path / "one.xml").contract.same_bits


def test_more_sends_than_a_connection_holds_are_a_deadlock(tmp_path: Path) -> None:
    """Two ranks send all before they receive. A connection of Simple holds two chunks, one of LL eight."""
    steps = [step(at, "s", f"i{at}") for at in range(3)] + [step(3 + at, "rrc", f"i{at}", f"i{at}") for at in range(3)]
    blocks = [[f'<tb id="0" send="{1 - rank}" recv="{1 - rank}" chan="0">{"".join(steps)}</tb>'] for rank in (0, 1)]
    text = algo("exchange", "allreduce", 3, blocks, 1)
    assert not verdict(text, tmp_path / "one.xml")
    simple = text.replace('proto="LL"', 'proto="Simple"')
    error = verdict(simple, tmp_path / "one.xml")
    assert error.startswith(
        "deadlock: rank 0, thread block 0, step 2 (s) waits for rank 1, thread block 0, step 3 (rrc)"
    )
    assert machine_agrees(simple, error, random.Random(0))


def test_a_send_of_several_chunks_fills_as_many_slots(tmp_path: Path) -> None:
    """An exchange of 4 chunks was written as one send, which 2 slots do not hold, and was read as one slot."""
    text = exchange(4).save(tmp_path / "one.xml", "msccl").read_text()
    assert not verdict(text, tmp_path / "one.xml")
    assert machine_agrees(text, "", random.Random(0))
    steps = [
        step(0, "s", has=1).replace('cnt="1"', 'cnt="4"'),
        step(0, "rrc", dep=(0, 0)).replace('cnt="1"', 'cnt="4"'),
    ]
    blocks = [
        [
            f'<tb id="0" send="{1 - rank}" recv="-1" chan="0">{steps[0]}</tb>',
            f'<tb id="1" send="-1" recv="{1 - rank}" chan="0">{steps[1]}</tb>',
        ]
        for rank in (0, 1)
    ]
    text = algo("exchange", "allreduce", 4, blocks, 1)
    assert not verdict(text, tmp_path / "one.xml")  # LL has 8 slots
    simple = text.replace('proto="LL"', 'proto="Simple"')
    error = verdict(simple, tmp_path / "one.xml")
    assert error.startswith("deadlock: rank 0, thread block 0, step 0, chunk 2 (s) waits for rank 1, thread block 1, ")
    assert machine_agrees(simple, error, random.Random(0))


def test_an_exchange_in_opposite_orders_is_not_exported(tmp_path: Path) -> None:
    """What is received first overwrites what is sent last, so both ranks would wait for a slot."""
    with pytest.raises(ValueError, match="not written as msccl, whose reader refuses it: deadlock: rank 0"):
        exchange(8, -1).save(tmp_path / "one.xml", "msccl")
    assert not (tmp_path / "one.xml").exists()


def test_a_merged_run_stays_in_one_buffer(tmp_path: Path) -> None:
    """Chunk numbers go on from i to o; a run of them was written as one step, and o[4] did not exist."""
    schedule = synthesize(Graph.ring(4), "all_to_all", 1e6, chunks=1).found.schedule
    for kind in ("msccl", "mscclpp"):
        assert has_results_of(Schedule.load(schedule.save(tmp_path / "one", kind)), schedule), kind


def test_sums_that_a_runtime_does_together_have_one_count(tmp_path: Path) -> None:
    text = BASES["one shot"](tmp_path).replace('nchunksperloop="1"', 'nchunksperloop="2"')
    before, last_one = text.rsplit('type="re"', 1)
    error = verdict(before + 'type="re"' + last_one.replace('cnt="1"', 'cnt="2"', 1), tmp_path / "one.xml")
    assert "it adds cnt=2 chunks, and the re before it, which has the same destination, cnt=1" in error


@pytest.mark.parametrize("has", [0, 1])
def test_a_nop_announces_nothing(has: int, tmp_path: Path) -> None:
    """A runtime drops a nop after it has waited, so a dependency on it ends with the next step that has hasdep."""
    blocks = []
    for peer in (1, 0):
        first = step(0, "nop", has=1) + step(1, "s", has=has)
        second = step(0, "rrc", dep=(0, 0))
        blocks.append(
            [
                f'<tb id="0" send="{peer}" recv="-1" chan="0">{first}</tb>',
                f'<tb id="1" send="-1" recv="{peer}" chan="0">{second}</tb>',
            ]
        )
    text = algo("after_nop", "allreduce", 1, blocks, 1)
    error = verdict(text, tmp_path / "one.xml")
    assert error.startswith("" if has else "deadlock: rank 0, thread block 1, step 0 (rrc) waits for step 0")
    assert bool(error) != bool(has)
    assert machine_agrees(text, error, random.Random(0))


REFUSED = {
    "an entity": ("<algo", '<!DOCTYPE a [<!ENTITY b "c">]><algo', "has a declaration"),
    "no XML": ("</algo>", "", "the file is not XML"),
    "another root": ("algo", "graph", "the root is <graph>"),
    "a collective": ("allreduce", "custom", "the collective 'custom' cannot be proved"),
    "a type": ('type="re"', 'type="ra"', "this type cannot be proved"),
    "an overlap": (
        'type="nop" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1"',
        'type="cpy" srcbuf="s" srcoff="0" dstbuf="s" dstoff="1" cnt="2"',
        "its source and its destination overlap",
    ),
    "a protocol": ("LL", "LL256", "it must be one of Simple, LL, LL128"),
    "no number": ('cnt="1"', 'cnt="one"', "cnt='one' is not a number"),
    "a missing field": (' depid="-1"', "", "has no depid"),
    "a GPU": ('gpu id="3"', 'gpu id="4"', "the ids of the GPUs are"),
    "a number of GPUs": (
        'ngpus="4"',
        'ngpus="400000000000"',
        "ngpus=400000000000, but the ids of the GPUs are [0, 1, 2, 3]",
    ),
    "a large buffer": ('nchunksperloop="1"', 'nchunksperloop="99999999"', "more than 10,000,000 chunks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_proved_is_refused_by_a_sentence(case: str, tmp_path: Path) -> None:
    old, new, message = REFUSED[case]
    assert message in verdict(one_shot(4).replace(old, new), tmp_path / "one.xml")


def test_prove_says_what_is_wrong_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.xml"
    path.write_text(one_shot(3))
    assert main(["prove", str(path)]) == 0
    expected = f"✓ {path}: all_reduce one_shot, 3 ranks, 1 chunks, 3 steps; the last bits may differ by rank\n"
    assert capsys.readouterr().out == expected
    path.write_text(one_shot(3).replace('type="nop"', 'type="nop" x=""').replace('depid="1"', 'depid="-1"'))
    assert main(["prove", str(path)]) == 1
    assert f"✗ {path}: race: rank 0, thread block" in capsys.readouterr().out
