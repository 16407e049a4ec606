"""The bound of an all_to_all: the least seconds in which a flow of several commodities serves all pairs of ranks.

A cut is not enough here: with many sources and ends the data may need more time than any cut shows. SciPy's HiGHS
solves the linear program, in which each rank sends its blocks to all other ranks at once, over any number of ways:

    minimize  seconds     such that, for data of one byte,
        of each rank's flow, 1 / ranks of a byte ends at each other rank, and nothing at a switch
        all flows over a link together are at most its bandwidth * seconds
"""

from __future__ import annotations

import math

import numpy as np

from .graph import Graph

__all__: list[str] = []


def flow_bound(graph: Graph, seconds: float = math.inf) -> float:
    """The seconds for each byte of the data of a rank, without latency; ImportError without scipy.

    TimeoutError if it is not found in so many ``seconds``.

    >>> flow_bound(Graph(1, []))
    0.0
    """
    from scipy import optimize, sparse

    size, nodes, links = graph.ranks, len(graph.nodes), len(graph.links)
    if size == 1:
        return 0.0
    # 1. Of the flow of each rank: what enters a node and does not leave it.
    number, ones = np.arange(links), np.ones(links)
    enters = sparse.coo_array((ones, (graph.ends[1], number)), (nodes, links))
    leaves = sparse.coo_array((ones, (graph.ends[0], number)), (nodes, links))
    kept = sparse.hstack([sparse.kron(sparse.eye_array(size), enters - leaves), np.zeros((size * nodes, 1))])
    wanted = np.zeros((size, nodes))
    wanted[:, :size] = 1 / size - np.eye(size)
    # 2. The flows over each link together, in its own bandwidth; the last variable is the seconds.
    speed = graph.bandwidth / graph.bandwidth.max()
    loads = sparse.hstack([sparse.kron(np.ones((1, size)), sparse.eye_array(links)), -speed[:, None]])
    limit = {} if seconds == math.inf else {"time_limit": max(seconds, 0.0)}
    cost = np.append(np.zeros(size * links), 1.0)
    solved = optimize.linprog(
        cost, loads, np.zeros(links), kept.tocsc(), wanted.ravel(), method="highs-ipm", options=limit
    )
    if solved.status:
        raise TimeoutError(f"flow_bound of {size} ranks and {links} links, in {seconds:.3g} s: {solved.message}")
    return float(solved.fun) / float(graph.bandwidth.max())
