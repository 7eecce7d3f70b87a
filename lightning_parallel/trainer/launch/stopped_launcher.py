"""What ranks do about a process that started them and is stopped: it waits for nothing and ends by itself no more.

The one idea: every forked or spawned rank looks at that process's state. Looks are counted rather than seconds, so that
ranks that were stopped together with it (Ctrl-Z) find nothing when all go on. It is killed then, and the kernel ends
its ranks with it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from lightning_parallel.failure.patience import Patience
from lightning_parallel.failure.processes import is_stopped


def look_after_launcher(rank: int, patience: Patience | None) -> None:
    """In a rank's process: have a thread end all if the process that started it is stopped for long.

    Args:
        rank: those behind rank 0 look so many times more, so that one of them tells of it.
        patience: its ``stale_s`` is how long the process may be stopped.
    """
    patience = patience or Patience()
    looks = max(2, round(patience.stale_s / patience.beat_s)) + rank
    arguments = (os.getppid(), looks, patience.beat_s)
    threading.Thread(target=_look, args=arguments, name="lightning-parallel-launcher", daemon=True).start()


def _look(launcher: int, looks: int, look_s: float) -> None:
    seen = 0
    while seen < looks:
        time.sleep(look_s)
        seen = seen + 1 if is_stopped(launcher) else 0
    text = (
        f"StageError: the process that started the ranks ({launcher}) was stopped (SIGSTOP) for {looks * look_s:.0f} s;"
        " it is ended now, and all ranks with it\n"
    )
    os.write(2, text.encode())
    with suppress(ProcessLookupError):
        os.kill(launcher, signal.SIGKILL)
