"""Line coverage of the package and of csrc; see ``tests/helpers/measure_lines.py``."""
