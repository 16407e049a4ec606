"""Exercises in collective communication, which a program checks: ``python -m dist_prims learn``.

An exercise is a file to complete. The check proves what the learner has written, by the proof that every schedule of
the library must pass, and names the first wrong step. Solutions are in the tests of the library only.
"""

__all__: list[str] = []
