"""What the system knows of a process: its host, whether it computes, its connections, where its thread is."""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress


def this_process() -> tuple[str, int]:
    """A name of this host (and its process name space) and this process's id, comparable between ranks."""
    place = socket.gethostname()
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        place += f" {file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    return place, os.getpid()


def processor_seconds(pid: int) -> float:
    """Processor time a process of this host has used; 0 if it cannot be read."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def is_stopped(pid: int) -> bool:
    """Whether a process of this host was stopped by a signal (SIGSTOP), and not by a debugger."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
    return False


def open_sockets() -> set[tuple[int, str]]:
    """Descriptors of this process's sockets with the kernel's names for them (descriptors are used again)."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                identity = os.readlink(f"/proc/self/fd/{name}")
                if identity.startswith("socket:"):
                    found.add((int(name), identity))
    return found


def whereabouts() -> str:
    """In which function, file and line the main thread is, in brackets behind a space; empty if that is not known."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else f" (it was in {frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno})"


def end_silent(process: tuple[str, int], own: tuple[str, int]) -> None:
    """Kill a process that has given no sign of life, if it is of this host: who is stopped does not end by itself.

    Its connection is still open, so it has not ended, and nobody else has its number.
    """
    if process[0] == own[0] and process[1] != own[1]:
        with suppress(OSError):
            os.kill(process[1], signal.SIGKILL)
