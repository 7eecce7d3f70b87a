"""These tests are for `make test-gpu`; any other command passes them by."""

import os

collect_ignore_glob = [] if os.environ.get("TEST_GPUS") == "1" else ["*.py"]
