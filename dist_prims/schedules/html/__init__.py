"""Interactive pages: one HTML file for a schedule or a pipeline plan, without a network.

A page is data and a program: Python computes what every chunk holds after each step, the proof and the prices, and
writes them as JSON into the file; the scripts in ``assets`` draw them. Nothing about schedules is computed twice: a
script replays the states that the proof has found, and evaluates the terms of the cost model that the page contains.
"""

__all__: list[str] = []
