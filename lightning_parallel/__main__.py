"""``python -m lightning_parallel`` is the command ``lightning-parallel``."""

import sys

from lightning_parallel.cli import main

sys.exit(main())
