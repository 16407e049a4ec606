"""Traces of real runs: what each rank sends, waits for and reduces, with times.

    with dist_prims.trace("traces"):        # every rank; or DIST_PRIMS_TRACE=traces for an unchanged program
        train()

    python -m dist_prims trace report traces
    python -m dist_prims trace chrome traces -o trace.json

Each process writes a file of its own, without communication. Reading needs NumPy only; this package imports no torch.
"""

from .session import trace

__all__ = ["trace"]
