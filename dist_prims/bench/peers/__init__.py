"""``python -m dist_prims.bench.peers``: all_reduce beside the libraries that others would take for it on one host."""
