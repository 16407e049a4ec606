"""Adapters: this backend for frameworks that have their own interface for a backend.

A framework calls its adapter by an entry point, or the program imports the adapter. Each module needs its framework,
and no other module of dist_prims imports it. Frameworks that take the name of a backend need no adapter.
"""
