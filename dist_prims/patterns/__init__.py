"""Patterns of training that only some programs need.

- :mod:`.parameter_server`: workers that pull parameters from a server and push gradients to it
"""
