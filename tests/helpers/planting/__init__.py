"""Mistakes planted in sources, to see which tests notice them; see ``tests/helpers/planted_mistakes.py``."""
