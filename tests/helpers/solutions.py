"""A right answer to every exercise. They are here only, so that the package does not give them away."""

IMPORTS = """\
import math
import numpy as np
from dist_prims.learn.messages import AllReduce, Receive, Send
from dist_prims.schedules import Step, ceil_log2
from dist_prims.schedules.pipelines import Action
"""
_ANSWERS = """
## ring_pass
def program(rank, size, value):
    following, previous = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        received = yield Receive(source=previous)
        yield Send(to=following, value=value)
    else:
        yield Send(to=following, value=value)
        received = yield Receive(source=previous)
    return received

## deadlock
def program(rank, size, value):
    left = right = None
    for turn in (0, 1):
        if rank % 2 == turn:
            if rank > 0:
                yield Send(to=rank - 1, value=value)
            if rank < size - 1:
                yield Send(to=rank + 1, value=value)
        else:
            if rank < size - 1:
                right = yield Receive(source=rank + 1)
            if rank > 0:
                left = yield Receive(source=rank - 1)
    return left, right

## broadcast_tree
def broadcast(size, root):
    for step in range(ceil_log2(size)):
        place = np.arange(min(2**step, size - 2**step))
        yield Step(src=(root + place) % size, dst=(root + place + 2**step) % size, chunk=0)

## reduce_tree
def reduce(size, root):
    for step in range(ceil_log2(size)):
        place = np.arange(0, size - 2**step, 2 ** (step + 1))
        yield Step(src=(root + place + 2**step) % size, dst=(root + place) % size, chunk=0, reduce=True)

## ring_reduce_scatter
def reduce_scatter(size):
    rank = np.arange(size)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - 1 - step) % size, reduce=True)

## ring_all_gather
def all_gather(size):
    rank = np.arange(size)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size)

## ring_all_reduce
def all_reduce(size):
    rank = np.arange(size)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size, reduce=True)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank + 1 - step) % size)

## same_bits
def all_reduce(size):
    for rank in range(1, size):
        yield Step(src=rank, dst=0, chunk=0, reduce=True)
    for rank in range(1, size):
        yield Step(src=0, dst=rank, chunk=0)

## ring_order
def add(values, chunk):
    total = values[chunk]
    for distance in range(1, len(values)):
        total = total + values[(chunk + distance) % len(values)]
    return total

## recursive_doubling
def all_reduce(size):
    rank = np.arange(size)
    for step in range(ceil_log2(size)):
        yield Step(src=rank, dst=rank ^ (1 << step), chunk=0, reduce=True)

## crossover
def crossover(n, alpha, beta):
    doubling = math.log2(n)
    return alpha * (2 * (n - 1) - doubling) / (beta * (doubling - 2 * (n - 1) / n))

## halving_doubling
def exchange(size, distance, half_of, reduce):
    rank, chunk = np.meshgrid(np.arange(size), np.arange(size))
    rank, chunk = rank.ravel(), chunk.ravel()
    mine = chunk // distance == half_of(rank, distance)
    return Step(src=rank[mine], dst=rank[mine] ^ distance, chunk=chunk[mine], reduce=reduce)

def all_reduce(size):
    for step in reversed(range(ceil_log2(size))):
        yield exchange(size, 1 << step, lambda rank, distance: (rank ^ distance) // distance, True)
    for step in range(ceil_log2(size)):
        yield exchange(size, 1 << step, lambda rank, distance: rank // distance, False)

## pairwise
def all_to_all(size):
    rank = np.arange(size)
    own = Step(src=rank, dst=rank, chunk=rank, into=size + rank)
    if size == 1:
        yield own
    for distance in range(1, size):
        dst = (rank + distance) % size
        move = Step(src=rank, dst=dst, chunk=dst, into=size + rank)
        yield move if distance > 1 else Step.concat([own, move])

## dissemination
def barrier(size):
    rank = np.arange(size)
    for step in range(ceil_log2(size)):
        yield Step(src=rank, dst=(rank + 2**step) % size, chunk=0, reduce=True)

## two_hosts
def all_reduce(size):
    place, first = np.tile(np.arange(3), 2), np.repeat([0, 3], 3)
    for distance in (1, 2):  # within each host: rank i collects chunks 2i and 2i+1
        other = (place + distance) % 3
        yield Step.concat([
            Step(src=first + place, dst=first + other, chunk=2 * other + part, reduce=True) for part in (0, 1)
        ])
    yield Step.concat([
        Step(src=first + place, dst=3 - first + place, chunk=2 * place + part, reduce=True) for part in (0, 1)
    ])
    for distance in (1, 2):
        other = (place + distance) % 3
        yield Step.concat([Step(src=first + place, dst=first + other, chunk=2 * place + part) for part in (0, 1)])

## shards
def shard(count, rank, size):
    return rank * count // size, (rank + 1) * count // size

## one_f_one_b
def order(rank, ranks, num_microbatches):
    ahead = min(ranks - 1 - rank, num_microbatches)
    for micro in range(ahead):
        yield Action("F", rank, micro)
    for micro in range(num_microbatches):
        if ahead + micro < num_microbatches:
            yield Action("F", rank, ahead + micro)
        yield Action("BW", rank, micro)

## zero_bubble
def order(rank, ranks, num_microbatches):
    ahead = min(ranks - 1 - rank, num_microbatches)
    last = num_microbatches - ahead - 1
    weights = 0
    for micro in range(ahead):
        yield Action("F", rank, micro)
    for micro in range(num_microbatches):
        if micro <= last:
            yield Action("F", rank, ahead + micro)
        yield Action("B", rank, micro)
        if not num_microbatches - ranks <= micro < last:
            yield Action("W", rank, weights)
            weights += 1
    for micro in range(weights, num_microbatches):
        yield Action("W", rank, micro)

## desync
def program(values):
    total = 0
    while True:
        left = yield AllReduce(1 if values else 0)
        if left == 0:
            return total
        total += yield AllReduce(values.pop() if values else 0)
"""
SOLUTIONS = {
    name: IMPORTS + answer for name, _, answer in (part.partition("\n") for part in _ANSWERS.split("\n## ")[1:])
}
