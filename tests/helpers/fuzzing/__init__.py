"""What tests/helpers/fuzz_backend.py runs: scripts of random steps, the steps, and the rank that takes them."""
