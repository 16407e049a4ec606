"""MSCCL++ execution plans: what is proved runs in every order, and what is refused fails in some order.

``PlanMachine`` is the independent check. It reads the JSON by itself and executes it in a random order: the threads of
a block between two ``nop`` ahead of each other, relaxed signals before what precedes them, puts over a port late.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from buffer_memory import BufferMemory, MemoryPlace, Value, WrongError, check_mutants, last, verdict

from dist_prims.cli import main
from dist_prims.schedules import Schedule, build

Plan = dict[str, Any]
Where = tuple[int, MemoryPlace]
PACKETS = {"ppkt", "rppkt", "respkt", "cpkt", "upkt", "repkt", "recpkt", "recspkt"}


@dataclass
class Task:
    """What one thread, or all threads of a block together, do at some time after other tasks."""

    name: str
    after: list[Task]
    act: Callable[[], None] = lambda: None
    is_ready: Callable[[], bool] = lambda: True
    done: bool = field(default=False)


def follows(after: list[Task], earlier: Task) -> bool:
    """Whether what runs after these tasks runs after an earlier task, too."""
    known = list(after)
    for task in known:  # the list grows while it is read
        known += [each for each in task.after if not any(each is one for one in known)]
    return any(task is earlier for task in known)


class PlanMachine(BufferMemory):
    """The ranks of a plan. ``strict``: a thread block does one operation after the other."""

    def __init__(self, plan: Plan, strict: bool) -> None:
        self.gpus = sorted(plan["gpus"], key=lambda gpu: gpu["id"])
        chunks = self.gpus[0]["output_chunks" if plan["collective"] == "allgather" else "input_chunks"]
        scratch = [gpu["scratch_chunks"] for gpu in self.gpus]
        super().__init__(plan["collective"], chunks, plan["inplace"], scratch)
        self.strict = strict
        self.memory: list[dict[MemoryPlace, Value]] = [{} for _ in self.gpus]
        self.packets: dict[Where, Value] = {}
        self.packet_writers: dict[Where, int] = {}
        self.is_double = plan["use_double_scratch_buffer"]
        self.scratch_users: dict[bool, set[int]] = {True: set(), False: set()}  # ranks, by whether with packets
        self.fired: Counter[Any] = Counter()
        self.waited: Counter[Any] = Counter()
        self.arrived: Counter[Any] = Counter()
        self.ended: set[int] = set()
        self.reductions: set[str] = set()
        self.tasks: list[Task] = []
        self.starts = [self.task(f"the start of rank {rank}", [], self.starter(rank)) for rank in range(self.size)]
        self.proxies: dict[Any, Task] = {}
        self.signalled: dict[Any, Task] = {}
        self.relaxed: dict[Any, list[bool]] = defaultdict(list)  # of each signal of a channel
        for rank, gpu in enumerate(self.gpus):
            own = [task for number in range(len(gpu["threadblocks"])) for task in self.read_block(rank, number)]
            self.task(f"the end of rank {rank}", [self.starts[rank], *own], self.ender(rank))
        if self.scratch_users[True] and plan["protocol"] != "LL":
            raise WrongError("the protocol has no packets")
        if self.scratch_users[True] & self.scratch_users[False] or len(self.reductions) > 1:
            raise WrongError("packets and others in one buffer, or several reductions")

    def task(self, name: str, after: list[Task], *given: Any) -> Task:
        self.tasks.append(Task(name, after, *given))
        return self.tasks[-1]

    def starter(self, rank: int) -> Callable[[], None]:
        def act() -> None:
            self.memory[rank] = self.start(rank)

        return act

    def ender(self, rank: int) -> Callable[[], None]:
        def act() -> None:
            self.failed |= not self.memory[rank].items() >= self.result(rank).items()
            self.ended.add(rank)

        return act

    def read_block(self, rank: int, number: int) -> list[Task]:
        """The tasks of a thread block; those of its proxies are not among them."""
        sync, since, own, rounds = self.starts[rank], list[Task](), list[Task](), Counter[int]()
        lanes: dict[int, Task] = {}
        for at, op in enumerate(self.gpus[rank]["threadblocks"][number]["ops"]):
            name = f"rank {rank}, thread block {number}, operation {at} ({op['name']})"
            first = len(self.tasks)
            before = [sync, *(since if self.strict else [])]
            if op["name"] == "nop":
                sync, since, lanes = self.task(name, [sync, *since]), [], {}
            elif op["name"] == "barrier":
                key, blocks = (rank, op["barrier_id"]), op["num_threadblocks"]
                rounds[op["barrier_id"]] += 1
                arrive = self.task(name, [sync, *since], lambda key=key: self.arrived.update([key]))
                target = rounds[op["barrier_id"]] * blocks
                sync = self.task(name, [arrive], lambda: None, lambda key=key, n=target: self.arrived[key] == n)
                since, lanes = [], {}
            elif "channel_ids" in op or "semaphore_ids" in op:
                since += self.read_control(rank, number, op, name, before, lanes)
            else:
                since += self.read_move(rank, number, op, name, before)
            own += self.tasks[first:]
        proxied = set(map(id, self.proxy_tasks))
        return [task for task in own if id(task) not in proxied]

    @property
    def proxy_tasks(self) -> Iterator[Task]:
        return (task for task in self.tasks if task.name.startswith("proxy "))

    def channel(self, rank: int, number: int, op: Plan, index: int) -> tuple[Any, ...]:
        ids = self.listed(self.gpus[rank]["threadblocks"][number]["channels"], "channel_type", op, "channel_ids")
        peers = self.listed(self.gpus[rank]["channels"], "channel_type", op, "connected_to")
        if not 0 <= index < len(ids) or not 0 <= ids[index] < len(peers):
            raise WrongError("no channel")
        peer = peers[ids[index]]
        return op["channel_type"], rank, peer, peers[: ids[index]].count(peer)

    def listed(self, entries: list[Plan], key: str, op: Plan, values: str) -> list[int]:
        return [value for entry in entries if entry[key] == op["channel_type"] for value in entry[values]]

    def read_control(
        self, rank: int, number: int, op: Plan, name: str, before: list[Task], lanes: dict[int, Task]
    ) -> list[Task]:
        tasks: list[Task] = []
        kind = op["name"]
        for lane, index in enumerate(op["semaphore_ids"] if "semaphore_ids" in op else op["channel_ids"]):
            after = [*before, *tasks[-1:]] if self.strict else [*before, *([lanes[lane]] if lane in lanes else [])]
            key = ("semaphore", rank, index) if "semaphore_ids" in op else self.channel(rank, number, op, index)
            if key[0] == "semaphore" and index >= len(self.gpus[rank]["semaphores"]):
                raise WrongError("no semaphore")
            if kind in ("wait", "rlxwait", "sem_acquire"):
                tasks.append(self.task(name, after, lambda: None, self.waiter(kind, key)))
            elif key[0] == "port" or kind == "flush":
                tasks += self.by_proxy(rank, number, op, name, lane, key, after)
            else:
                self.relaxed[key].append(kind == "rlxsignal")
                if kind == "rlxsignal" and not self.strict:
                    earlier = self.signalled.get(key)  # the signals of one thread on a channel stay in order
                    after = [self.starts[rank], *([earlier] if earlier and follows(after, earlier) else [])]
                signal = self.task(name, after, lambda key=key: self.fired.update([key]))
                self.signalled[key] = signal
                tasks.append(signal)
            lanes[lane] = tasks[-1]
        return tasks

    def waiter(self, kind: str, key: tuple[Any, ...]) -> Callable[[], bool]:
        if key[0] == "semaphore":
            signals, free = key, self.gpus[key[1]]["semaphores"][key[2]]["init_value"]
        else:
            signals, free = (key[0], key[2], key[1], key[3]), 0
        count = self.waited[signals]
        self.waited[signals] += 1
        partner = self.starts[key[2]] if key[0] == "memory" else None

        def is_ready() -> bool:
            is_relaxed = kind == "rlxwait" or self.relaxed[signals][count : count + 1] == [True]
            if partner and not self.strict and is_relaxed:  # it says only that the partner has begun
                return partner.done
            return self.fired[signals] + free > count

        return is_ready

    def by_proxy(
        self, rank: int, number: int, op: Plan, name: str, lane: int, key: tuple[Any, ...], after: list[Task]
    ) -> list[Task]:
        """The task that gives work to the proxy, and for ``flush`` the one that waits for it."""
        kind = op["name"]
        tasks = [self.task(name, [*after, *([self.proxies[key]] if kind == "flush" and key in self.proxies else [])])]
        acts: list[Callable[[], None]] = []
        if kind in ("put", "pws", "pwsf"):
            sources, targets = self.buffers(rank, number, op, "src_buff"), self.buffers(rank, number, op, "dst_buff")
            if not len(sources) == len(targets) == len(op["channel_ids"]):
                raise WrongError("channels")
            if targets[lane][0][0] != key[2]:
                raise WrongError("another rank")
            acts.append(self.mover([(sources[lane], targets[lane])], [(False, False)]))
        if kind in ("signal", "rlxsignal", "pws", "pwsf"):
            acts.append(lambda: self.fired.update([key]))
        for act in acts:
            earlier = [self.proxies[key]] if key in self.proxies else []
            self.proxies[key] = self.task(f"proxy {lane} of {name}", [*tasks[:1], *earlier], act)
        if kind == "pwsf":
            tasks.append(self.task(name, [*tasks, self.proxies[key]]))
        return tasks

    def buffers(self, rank: int, number: int, op: Plan, name: str) -> list[list[Where]]:
        found = []
        for buffer in op[name]:
            owner, kind = rank, buffer.get("type")
            if kind is None:
                refs = self.gpus[rank]["threadblocks"][number]["remote_buffer_refs"]
                ids = self.listed(refs, "access_channel_type", op, "remote_buffer_ids")
                if not 0 <= buffer["buffer_id"] < len(ids):
                    raise WrongError("no remote buffer")
                remote = self.gpus[rank]["remote_buffers"][ids[buffer["buffer_id"]]]
                owner, kind = remote["rank"], remote["type"]
            places = range(buffer["index"], buffer["index"] + buffer["size"])
            found.append([(owner, self.place(owner, kind, at)) for at in places])
        if len({len(each) for each in found}) != 1 or not found[0]:
            raise WrongError("sizes")
        return found

    def read_move(self, rank: int, number: int, op: Plan, name: str, before: list[Task]) -> list[Task]:
        kind = op["name"]
        sources, targets = self.buffers(rank, number, op, "src_buff"), self.buffers(rank, number, op, "dst_buff")
        if kind == "rppkt":
            sources = sources[:1] * len(targets)
        sums = kind in ("re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt")
        if sums and "reduce_op" not in op:
            raise WrongError("reduce_op")
        self.reductions |= {op["reduce_op"]} if sums else set()
        if len(sources[0]) != len(targets[0]) or (not sums and len(sources) != len(targets)):
            raise WrongError("sizes")
        reads, writes = kind in ("upkt", "rppkt"), kind in ("cpkt", "ppkt", "rppkt")
        from_packets = [reads or (sums and kind in PACKETS and at > 0) for at in range(len(sources))]
        to_packets = [writes or (sums and kind in PACKETS and at > 0) for at in range(len(targets))]
        for buffers, packed in ((sources, from_packets), (targets, to_packets)):
            for places, is_packed in zip(buffers, packed, strict=True):
                self.scratch_users[is_packed].update(owner for owner, place in places if place[0] == "s")
                if is_packed and places in targets:
                    self.packet_writers.update(dict.fromkeys(places, rank))
                if is_packed and any(place[0] != "s" for _, place in places):
                    raise WrongError("packets outside of scratch")
        self.check_overlap(sources, targets, sums)
        tasks: list[Task] = []
        for part in [[at] for at in range(len(sources[0]))] if kind in PACKETS else [range(len(sources[0]))]:
            src, dst = ([[places[at] for at in part] for places in each] for each in (sources, targets))
            needed = [each for places, packed in zip(src, from_packets, strict=True) if packed for each in places]
            ready = lambda needed=needed: all(each in self.packets for each in needed)  # noqa: E731
            if sums:
                acts = [self.adder(src, dst[0], from_packets)]
                forwards = zip(dst[1:], to_packets[1:], strict=True)
                acts += [self.mover([(dst[0], each)], [(False, into)]) for each, into in forwards]
            else:
                flags = list(zip(from_packets, to_packets, strict=True))
                acts = [self.mover(list(zip(src, dst, strict=True)), flags)]
            for at, act in enumerate(acts):
                tasks.append(self.task(name, tasks[-at:] if at else before, act, ready))
        return tasks

    def check_overlap(self, sources: list[list[Where]], targets: list[list[Where]], sums: bool) -> None:
        written = [place for places in targets for place in places]
        at = {place: number for places in targets for number, place in enumerate(places)}
        moved = [
            (one, two) for src, dst in zip(sources, targets, strict=False) for one, two in zip(src, dst, strict=True)
        ]
        moved = [(one, two) for one, two in moved if one != two]
        shifted = any(at.get(place, number) != number for places in sources for number, place in enumerate(places))
        if len(set(written)) < len(written) or shifted or (not sums and {a for a, _ in moved} & {b for _, b in moved}):
            raise WrongError("overlap")

    def get(self, where: Where, packet: bool) -> Value:
        rank, place = where
        if packet:
            is_overwritten = self.packet_writers[where] in self.ended and not self.is_double  # by the next call
            self.failed |= is_overwritten
            return self.packets[where]
        if rank in self.ended or place not in self.memory[rank]:
            self.failed = True
        return self.memory[rank].get(place, (-1, ()))

    def put(self, where: Where, value: Value, packet: bool) -> None:
        rank, place = where
        self.failed |= where in self.packets if packet else rank in self.ended
        if packet:
            self.packets[where] = value
        else:
            self.memory[rank][place] = value

    def mover(self, pairs: list[tuple[list[Where], list[Where]]], flags: list[tuple[bool, bool]]) -> Callable[[], None]:
        def act() -> None:
            values = [[self.get(each, one) for each in src] for (src, _), (one, _) in zip(pairs, flags, strict=True)]
            for (_, dst), moved, (_, two) in zip(pairs, values, flags, strict=True):
                for each, value in zip(dst, moved, strict=True):
                    self.put(each, value, two)

        return act

    def adder(self, sources: list[list[Where]], into: list[Where], flags: list[bool]) -> Callable[[], None]:
        def act() -> None:
            for at, place in enumerate(into):
                total, *values = (self.get(src[at], flag) for src, flag in zip(sources, flags, strict=True))
                for value in values:
                    total = self.sum_of(total, value)
                self.put(place, total, False)

        return act

    def run(self, choose: Callable[[list[str]], str]) -> tuple[bool, list[str]]:
        """Whether all ranks end with the right result, and the tasks in the order in which they ran."""
        done: list[str] = []
        left = list(self.tasks)
        while ready := {t.name: t for t in reversed(left) if t.is_ready() and all(each.done for each in t.after)}:
            task = ready[choose(list(ready))]
            task.act()
            task.done = True
            left.remove(task)
            done.append(task.name)
        if left:
            return False, [*done, "stuck"]
        return not self.failed and self.fired == self.waited, done


def may_come_late(plan: Plan, late: str, other: str) -> bool:
    """Whether an operation, or the part of it that a proxy does, can run after another one."""
    names = {task.name for task in PlanMachine(plan, strict=False).tasks}
    late_names, others = ([each for each in sorted(names) if each.endswith(name)] for name in (late, other))
    for name in late_names:
        done = PlanMachine(plan, strict=False).run(last(name))[1]
        if min(done.index(each) for each in others) < len(done) - done[::-1].index(name) - 1:
            return True
    return False


RACES = (
    r"race: (.*?\)) \w+ .*? of rank \d+; (.*?\)) \w+ it",
    r"race: (.*?\)) \w+ .* may do so (?:before|after) (the .* of rank \d+)",
    r"race: (.*?\)) and (.*?\)) use",
)


def plan_agrees(plan: Plan, error: str, chance: random.Random) -> bool:
    """Whether the machine finds what the verdict says: a right result in every order, or the failure."""
    if "cannot be proved" in error:
        return True
    try:
        if race := next(filter(None, (re.match(form, error) for form in RACES)), None):
            # Either of the two comes first, if the other one waits as long as it can.
            return race[1] != race[2] and all(may_come_late(plan, race[late], race[3 - late]) for late in (1, 2))
        strict = error.startswith("deadlock")
        runs = [PlanMachine(plan, strict).run(chance.choice) for _ in range(2 if error else 6)]
        if not error:
            runs += [PlanMachine(plan, strict=True).run(chance.choice)]
    except WrongError:
        return bool(error)
    if strict:
        return all(done[-1:] == ["stuck"] for _, done in runs)
    return all(is_right == (not error) for is_right, _ in runs)


def buffers(*names: str) -> list[Plan]:
    """``i2`` is a chunk of an own buffer, ``0:2`` chunk 2 of remote buffer 0."""
    found: list[Plan] = []
    for name in names:
        remote, colon, index = name.partition(":")
        found.append(
            {"buffer_id": int(remote), "index": int(index)} if colon else {"type": name[0], "index": int(name[1:])}
        )
    return [{**each, "size": 1} for each in found]


def move(name: str, src: list[str], dst: list[str], **more: Any) -> Plan:
    return {"name": name, "src_buff": buffers(*src), "dst_buff": buffers(*dst), "channel_type": "memory", **more}


def control(name: str, count: int, kind: str = "memory") -> Plan:
    return {"name": name, "channel_ids": list(range(count)), "channel_type": kind}


NOP = {"name": "nop"}


def make_plan(
    collective: str, inplace: bool, blocks: Callable[[int], list[list[Plan]]], size: int, remote: str, **more: Any
) -> Plan:
    """A plan whose ranks have a channel to each peer, and access the buffer ``remote`` of each peer."""
    kind = more.get("kind", "memory")
    gpus = []
    for rank in range(size):
        peers = [peer for peer in range(size) if peer != rank]
        ids = list(range(size - 1))
        gpus.append(
            {
                "id": rank,
                "input_chunks": 1 if collective == "allgather" else size,
                "output_chunks": size,
                "scratch_chunks": more.get("scratch", 0),
                "threadblocks": [
                    {
                        "id": number,
                        "ops": ops,
                        "channels": [{"channel_type": kind, "channel_ids": ids}],
                        "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": ids}],
                    }
                    for number, ops in enumerate(blocks(rank))
                ],
                "channels": [{"channel_type": kind, "connected_to": peers}],
                "remote_buffers": [{"rank": peer, "type": remote, "access_channel_types": [kind]} for peer in peers],
                "semaphores": [{"init_value": 0}],
            }
        )
    protocol = "LL" if more.get("double") else "Simple"
    head = {"name": "plan", "collective": collective, "inplace": inplace, "protocol": protocol}
    return {**head, "use_double_scratch_buffer": more.get("double", False), "gpus": gpus}


def read_and_reduce(size: int) -> Plan:
    """Each rank adds up one chunk of all ranks where it lies, and writes the sum to all of them."""

    def blocks(rank: int) -> list[list[Plan]]:
        remote = [f"{peer}:{rank}" for peer in range(size - 1)]
        add = move("rres", [f"i{rank}", *remote], [f"i{rank}", *remote], reduce_op="sum")
        hello = [control("rlxsignal", size - 1), control("rlxwait", size - 1), NOP]
        return [[*hello, add, NOP, control("signal", size - 1), control("wait", size - 1)]]

    return make_plan("allreduce", True, blocks, size, "i")


def packets(size: int) -> Plan:
    """Two steps of packets: each rank adds up one chunk, and sends the sum."""

    def blocks(rank: int) -> list[list[Plan]]:
        peers = [peer for peer in range(size) if peer != rank]
        send = move("ppkt", [f"i{peer}" for peer in peers], [f"{at}:{rank}" for at in range(size - 1)])
        sums = [f"{at}:{size + rank}" for at in range(size - 1)]
        add = move("respkt", [f"i{rank}", *(f"s{peer}" for peer in peers)], [f"i{rank}", *sums], reduce_op="sum")
        return [[send], [add], [move("upkt", [f"s{size + peer}"], [f"i{peer}"]) for peer in peers]]

    return make_plan("allreduce", True, blocks, size, "s", scratch=2 * size, double=True)


def over_ports(size: int) -> Plan:
    """Each rank puts its chunk over port channels, whose proxies work later."""

    def blocks(rank: int) -> list[list[Plan]]:
        hello = [control("signal", size - 1, "port"), control("wait", size - 1, "port"), NOP]
        put = move("pws", [f"o{rank}"] * (size - 1), [f"{at}:{rank}" for at in range(size - 1)])
        put |= control("pws", size - 1, "port")
        return [[*hello, put, control("flush", size - 1, "port"), control("wait", size - 1, "port")]]

    return make_plan("allgather", True, blocks, size, "o", kind="port")


def two_blocks(size: int) -> Plan:
    """One thread block synchronizes with the peers, the other one reads from them."""

    def blocks(rank: int) -> list[list[Plan]]:
        barrier = {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}
        peers = [peer for peer in range(size) if peer != rank]
        gets = [move("get", [f"{at}:0"], [f"o{peer}"]) for at, peer in enumerate(peers)]
        release, acquire = ({"name": name, "semaphore_ids": [0]} for name in ("sem_release", "sem_acquire"))
        first = [control("rlxsignal", size - 1), control("rlxwait", size - 1), barrier, acquire, NOP]
        second = [barrier, *gets, move("copy", ["i0"], [f"o{rank}"]), NOP, release]
        return [[*first, control("signal", size - 1), control("wait", size - 1)], second]

    return make_plan("allgather", False, blocks, size, "i")


def exported(collective: str, name: str, size: int, folder: Path) -> Plan:
    plan: Plan = json.loads(build(collective, name, size).save(folder / "one.json", "mscclpp").read_text())
    return plan


BASES: dict[str, Callable[[Path], Plan]] = {
    "read and reduce": lambda _: read_and_reduce(3),
    "packets": lambda _: packets(3),
    "over ports": lambda _: over_ports(3),
    "two blocks": lambda _: two_blocks(3),
    "ring": lambda folder: exported("all_reduce", "ring", 3, folder),
    "direct": lambda folder: exported("reduce_scatter", "direct", 3, folder),
    "bruck": lambda folder: exported("all_to_all", "bruck", 3, folder),
    "all_gather": lambda folder: exported("all_gather", "bruck", 4, folder),
}


@pytest.mark.parametrize("base", BASES)
def test_a_plan_is_proved_and_runs_in_random_orders(base: str, tmp_path: Path) -> None:
    plan = BASES[base](tmp_path)
    assert not verdict(json.dumps(plan), tmp_path / "two.json")
    assert plan_agrees(plan, "", random.Random(base))


def mutant(plan: Plan, chance: random.Random) -> Plan:
    """The plan with one mistake."""
    changed = copy.deepcopy(plan)
    blocks = [block for gpu in changed["gpus"] for block in gpu["threadblocks"] if block["ops"]]
    ops = chance.choice(blocks)["ops"]
    at = chance.randrange(len(ops))
    op, kind = ops[at], chance.randrange(6)
    named = [buffer for each in ("src_buff", "dst_buff") for buffer in op.get(each, [])]
    if kind == 0 and named:
        key = chance.choice(["index", "index", "size", "buffer_id"])
        buffer = chance.choice(named)
        buffer[key] = max(0, buffer.get(key, 0) + chance.choice([-1, 1])) if key in buffer else 0
    elif kind == 1 and named:
        buffer = chance.choice(named)
        if "type" in buffer:
            buffer["type"] = chance.choice("ios")
    elif kind == 2:
        moved = ops.pop(at)
        if chance.random() < 0.5:
            ops.insert(chance.randrange(len(ops) + 1), moved)
    elif kind == 3:
        nops = [number for number, each in enumerate(ops) if each["name"] == "nop"]
        ops.pop(chance.choice(nops or [at]))
    elif kind == 4:
        other = {"signal": "rlxsignal", "rlxsignal": "signal", "wait": "rlxwait", "rlxwait": "wait", "re": "copy"}
        other |= {"copy": "re", "put": "get", "rres": "rre", "pws": "put", "respkt": "repkt"}
        op["name"] = other.get(op["name"], op["name"])
    elif "channel_ids" in op and len(op["channel_ids"]) > 0:
        ids = op["channel_ids"]
        ids[chance.randrange(len(ids))] = chance.choice(ids)
        op["channel_ids"] = ids if chance.random() < 0.5 else ids[1:]
    return changed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("base", BASES)
def test_mutants_are_refused_or_right(base: str, tmp_path: Path) -> None:
    """125 plans with one mistake for each base: 1,000 together."""
    check_mutants(BASES[base](tmp_path), mutant, plan_agrees, random.Random(base), tmp_path / "two.json")


LIMITS: dict[str, tuple[str, str, int]] = {
    "11 source buffers of an operation, and an executor of MSCCL++ holds 10": ("all_reduce", "direct", 11),
    "17 channels of a thread block, and an executor of MSCCL++ holds 16": ("all_gather", "direct", 18),
    "17 barriers of a rank, and an executor of MSCCL++ holds 16": ("all_reduce", "ring", 70),
    "operations of a thread block, and an executor of MSCCL++ holds 64": ("all_to_all", "bruck", 64),
    "more than 30,000 operations": ("all_reduce", "ring", 50),
}


@pytest.mark.parametrize("message", LIMITS)
def test_a_schedule_that_an_executor_does_not_hold_is_not_exported(message: str, tmp_path: Path) -> None:
    """Such plans were written, and some of them were too large for this library to read."""
    with pytest.raises(ValueError, match=re.escape(message)):
        build(*LIMITS[message]).save(tmp_path / "one.json", "mscclpp")
    assert not (tmp_path / "one.json").exists()


def wrong(plan: Plan, change: Callable[[Plan], object]) -> Plan:
    changed = copy.deepcopy(plan)
    change(changed)
    return changed


def first_op(plan: Plan) -> Plan:
    op: Plan = plan["gpus"][0]["threadblocks"][0]["ops"][0]
    return op


REFUSED: dict[str, tuple[Callable[[Plan], object], str]] = {
    "a switch": (lambda plan: first_op(plan).update(channel_type="switch"), "'rlxsignal' with switch channels cannot"),
    "a loop": (lambda plan: first_op(plan).update(name="pipeline"), "'pipeline' with memory channels cannot"),
    "a group": (lambda plan: first_op(plan).update(tbg_info={}), "groups of thread blocks cannot be proved"),
    "no channel": (lambda plan: first_op(plan).update(channel_ids=[7]), "memory channel 7 does not exist; there are 2"),
    "no number": (lambda plan: first_op(plan).update(channel_ids=["a"]), "channel_ids='a' is not a number"),
    "a collective": (lambda plan: plan.update(collective="sendrecv"), "the collective 'sendrecv' cannot be proved"),
    "a missing field": (lambda plan: plan.pop("inplace"), "the field 'inplace' is missing"),
    "chunks": (lambda plan: plan["gpus"][0].update(output_chunks=2), "are (3, 2), which do not fit all_reduce"),
    "GPUs": (lambda plan: plan["gpus"].pop(0), "the ids of the GPUs are [1, 2]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_cannot_be_proved_is_refused_by_a_sentence(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    assert message in verdict(json.dumps(wrong(read_and_reduce(3), change)), tmp_path / "one.json")


# What users of MSCCL++ get wrong most: the order of signals and waits.
ORDERS: dict[str, tuple[int, str]] = {
    "the hello": (1, "reads i[0] of rank 1, and may do so before the start of rank 1"),
    "a nop": (4, "writes i[0] of rank 1, and may do so after the end of rank 1"),
    "a signal": (5, "operation 6 (wait) waits for a signal that no operation sends"),
    "a wait": (6, "the signal of rank 1, thread block 0, operation 5 (signal) has no wait"),
}


@pytest.mark.parametrize("case", ORDERS)
def test_what_a_plan_lacks_between_two_operations_is_named(case: str, tmp_path: Path) -> None:
    number, message = ORDERS[case]
    changed = wrong(read_and_reduce(2), lambda plan: plan["gpus"][0]["threadblocks"][0]["ops"].pop(number))
    if case == "the hello":
        changed = wrong(changed, lambda plan: plan["gpus"][1]["threadblocks"][0]["ops"].pop(0))
    assert message in verdict(json.dumps(changed), tmp_path / "one.json")


def connected_twice(plan: Plan) -> None:
    """Each thread block of :func:`two_blocks` for 2 ranks gets a channel of its own."""
    for gpu in plan["gpus"]:
        gpu["channels"][0]["connected_to"] *= 2
        first, second = gpu["threadblocks"]
        second["channels"][0]["channel_ids"] = [1]
        second["ops"][-1:] = [control("signal", 1), control("wait", 1)]  # instead of the semaphore
        del first["ops"][-4:]  # its semaphore, the nop, and the last signal and wait


def crossed(plan: Plan) -> None:
    """The ranks use different channels for the second thread block."""
    connected_twice(plan)
    plan["gpus"][1]["threadblocks"][1]["channels"][0]["channel_ids"] = [0]


def twice(plan: Plan) -> None:
    plan["gpus"][0]["threadblocks"][0]["ops"] *= 2


def without_release(plan: Plan) -> None:
    """The acquire of a rank without an order that is needed takes the initial value."""
    first, second = plan["gpus"][0]["threadblocks"]
    first["ops"].insert(4, {"name": "barrier", "barrier_id": 1, "num_threadblocks": 2})
    second["ops"][-1] = {"name": "barrier", "barrier_id": 1, "num_threadblocks": 2}
    plan["gpus"][0]["semaphores"][0]["init_value"] = 1


def released_twice(plan: Plan) -> None:
    ops = plan["gpus"][0]["threadblocks"][1]["ops"]
    ops.append(ops[-1])


def hurried(plan: Plan) -> None:
    """Without a nop, the two threads that signal over a channel may be in either order. The machine had one order."""
    ops = plan["gpus"][0]["threadblocks"][0]["ops"]
    ops.insert(1, ops.pop(5) | {"channel_ids": [1, 0]})


def answered(plan: Plan) -> None:
    """The ranks signal each other after they have read all packets, so one scratch buffer is enough."""
    plan["use_double_scratch_buffer"] = False
    for gpu in plan["gpus"]:
        first, *others = gpu["threadblocks"]
        barrier = {"name": "barrier", "barrier_id": 0, "num_threadblocks": 1 + len(others)}
        first["ops"] += [barrier, control("signal", 2), control("wait", 2)]
        for block in others:
            block["ops"].append(barrier)


OTHERS: dict[str, tuple[Callable[[int], Plan], Callable[[Plan], object], str]] = {
    "two channels": (two_blocks, connected_twice, ""),
    "another channel": (two_blocks, crossed, "waits for a signal that no operation sends"),
    "a free semaphore": (two_blocks, lambda plan: plan["gpus"][0]["semaphores"][0].update(init_value=1), "race: "),
    "an initial value for a release": (
        two_blocks,
        without_release,
        "takes a part of init_value=1, as 1 acquires have 0",
    ),
    "a release too many": (two_blocks, released_twice, "(sem_release) has no wait, so the next call would take it"),
    "two threads": (read_and_reduce, hurried, "(signal) use one channel, and either may come first"),
    "packets of Simple": (packets, lambda plan: plan.update(protocol="Simple"), "must have the protocol LL"),
    "packets in one buffer": (
        packets,
        lambda plan: plan.update(use_double_scratch_buffer=False),
        "and may do so after the end of rank",
    ),
    "packets in one buffer with an answer": (packets, answered, ""),
    "a barrier": (
        two_blocks,
        lambda plan: plan["gpus"][0]["threadblocks"][1]["ops"][0].update(num_threadblocks=3),
        "deadlock: 2 thread blocks reach barrier 0 of rank 0, but num_threadblocks is [3, 3]",
    ),
    "packets written twice": (packets, twice, "write packets to s[0] of rank 1, and a reader cannot tell which"),
    "packets and others": (
        packets,
        lambda plan: plan["gpus"][0]["threadblocks"][0]["ops"].append(move("copy", ["i0"], ["s3"])),
        "the scratch of rank 0 is accessed with packets and without",
    ),
    "two reductions": (
        packets,
        lambda plan: plan["gpus"][0]["threadblocks"][1]["ops"][0].update(reduce_op="max"),
        "the plan reduces by max and sum",
    ),
    "another rank's port": (
        over_ports,
        lambda plan: plan["gpus"][0]["threadblocks"][0]["ops"][3]["channel_ids"].reverse(),
        "the channel is connected to rank 2, the buffer is on rank 1",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_channels_semaphores_barriers_and_packets_are_checked(case: str, tmp_path: Path) -> None:
    make, change, message = OTHERS[case]
    plan = wrong(make(2 if "channel" in case else 3), change)
    error = verdict(json.dumps(plan), tmp_path / "one.json")
    assert message in error
    assert bool(message) == bool(error), error
    assert plan_agrees(plan, error, random.Random(case))


def test_a_rank_without_thread_blocks_starts_before_it_ends(tmp_path: Path) -> None:
    """It was a race of the start with the end of the rank, for any of its memory."""
    plan = make_plan("allgather", True, lambda rank: [], 1, "i")
    assert not verdict(json.dumps(plan), tmp_path / "one.json")
    assert plan_agrees(plan, "", random.Random(0))


def test_a_relaxed_signal_does_not_publish_what_was_written_before(tmp_path: Path) -> None:
    text = json.dumps(two_blocks(2)).replace('"signal"', '"rlxsignal"')
    assert "may do so after the end of rank" in verdict(text, tmp_path / "one.json")


def test_prove_reads_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(packets(3)))
    assert main(["prove", str(path)]) == 0
    assert capsys.readouterr().out == f"✓ {path}: all_reduce plan, 3 ranks, 3 chunks, 4 steps\n"


def test_packets_are_added_before_the_own_data(tmp_path: Path) -> None:
    assert not verdict(json.dumps(packets(3)), tmp_path / "one.json")
    assert str(Schedule.load(tmp_path / "one.json").order(chunk=0)) == "r1+r2+r0"
