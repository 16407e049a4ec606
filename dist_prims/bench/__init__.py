"""``python -m dist_prims.bench``: how fast a collective is, beside the others, and whether it is right."""
