"""``python -m dist_prims``: show, prove and recommend algorithms; ``doctor`` reports what this machine has."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
