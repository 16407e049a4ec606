"""``python -m dist_prims.bench.rivals``: all_reduce beside the libraries that others would take for it on one host."""
