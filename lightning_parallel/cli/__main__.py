"""`python -m lightning_parallel.cli` is the command `lightning-parallel`."""

import sys

from lightning_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
