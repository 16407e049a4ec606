"""Patterns of training that only some programs need.

- :mod:`.per_sample`: norms of the gradients of single samples
- :mod:`.parameter_server`: workers that pull parameters from a server and push gradients to it
"""
