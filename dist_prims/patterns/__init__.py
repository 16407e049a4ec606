"""Patterns of training that only some programs need.

- :mod:`.ensemble`: several models, each on its own ranks, and their mean prediction
- :mod:`.per_sample`: norms of the gradients of single samples
- :mod:`.parameter_server`: workers that pull parameters from a server and push gradients to it
"""
