"""``python -m dist_prims.bench.rivals``: comparison of all_reduce with other libraries on one host."""
