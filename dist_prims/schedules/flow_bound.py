"""The bound of an all_to_all: the least seconds in which a flow of several commodities serves all pairs of ranks.

A cut is not enough here: with many sources and ends the data may need more time than any cut shows. SciPy's HiGHS
solves the linear program, in which each rank sends its blocks to all other ranks at once, over any number of ways:

    minimize  seconds     such that, for data of one byte,
        of each rank's flow, 1 / ranks of a byte ends at each other rank, and nothing at a switch
        all flows over a link together are at most its bandwidth * seconds

Two ranks have one route, so up to 16 ranks the flow goes from rank to rank over the routes. For more ranks that program
is large, and the flow takes any links. Then the bound may be lower: on ``Graph.fat_tree(3, 4, 3)`` it would be by 13 %,
because three spine switches do not divide the four ranks of a leaf.
"""

from __future__ import annotations

import math

import numpy as np

from .graph import Graph

__all__: list[str] = []

MOST_ROUTED = 16  # ranks


def flow_bound(graph: Graph, seconds: float = math.inf) -> float:
    """The seconds for each byte of the data of a rank, without latency; ImportError without scipy.

    TimeoutError if the search takes more than ``seconds``.

    >>> flow_bound(Graph(1, []))
    0.0
    """
    from scipy import optimize, sparse

    size, links = graph.ranks, len(graph.links)
    if size == 1:
        return 0.0
    # 1. The ways of a flow: the routes between all ranks, or the links.
    src, dst = np.nonzero(~np.eye(size, dtype=np.bool_))
    if is_routed := size <= MOST_ROUTED:
        routes = [graph.route_numbers(*ends) for ends in zip(src.tolist(), dst.tolist(), strict=True)]
    else:
        (src, dst), routes = graph.ends, [(number,) for number in range(links)]
    nodes = size if is_routed else len(graph.nodes)
    ways, number = len(routes), np.arange(len(routes))
    passing = np.repeat(number, [len(route) for route in routes])
    passes = sparse.coo_array((np.ones(len(passing)), (np.concatenate(routes), passing)), (links, ways))
    # 2. Of the flow of each rank (a block of rows and variables each): what enters a node and does not leave it.
    enters = sparse.coo_array((np.ones(ways), (dst, number)), (nodes, ways))
    leaves = sparse.coo_array((np.ones(ways), (src, number)), (nodes, ways))
    kept = sparse.hstack([sparse.kron(sparse.eye_array(size), enters - leaves), np.zeros((size * nodes, 1))])
    demand = np.zeros((size, nodes))
    demand[:, :size] = 1 / size - np.eye(size)
    # 3. The flows over each link together, in its own bandwidth; the last variable is the seconds.
    speed = graph.bandwidth / graph.bandwidth.max()
    loads = sparse.hstack([sparse.kron(np.ones((1, size)), passes), -speed[:, None]])
    limit = {} if seconds == math.inf else {"time_limit": max(seconds, 0.0)}
    cost = np.append(np.zeros(size * ways), 1.0)
    solved = optimize.linprog(
        cost, loads, np.zeros(links), kept.tocsc(), demand.ravel(), method="highs-ipm", options=limit
    )
    if solved.status:
        raise TimeoutError(f"flow_bound of {size} ranks and {links} links, in {seconds:.3g} s: {solved.message}")
    return float(solved.fun) / float(graph.bandwidth.max())
