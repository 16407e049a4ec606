"""The demo: shows a ring all-reduce, checks every algorithm, trains a network on all ranks, and checks the result."""
