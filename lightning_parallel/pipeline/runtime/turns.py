"""Functions that run in turns and meet in the middle of what they do.

The one idea: a function that has to wait for the others is left where it is, deep in somebody's code, and the next one
runs. Each has a thread of its own for that, and only one of them runs at a time: the one that has its turn. What is
global and belongs to one function (generators, the active run, ...) is put away when its turn ends and put back when
the next one begins. Left out: speed; two of them never compute at once.
"""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Swap = tuple[Callable[[], Any], Callable[[Any], None]]  # how to read, and how to set, a global value
Meet = Callable[[list[Any]], Sequence[Any]]

_here = threading.local()


class _Ended(BaseException):
    """Another function has failed. A BaseException: nobody's `except Exception` takes it for his own."""


def swap_of(owner: Any, name: str) -> Swap:
    """An attribute of something that is there once."""
    return partial(getattr, owner, name), partial(setattr, owner, name)


_EVERYWHERE: tuple[Swap, ...] = ((torch.get_default_dtype, torch.set_default_dtype), swap_of(warnings, "filters"))


def in_turn() -> bool:
    """Whether this code runs in one of several functions that can meet."""
    return getattr(_here, "turn", None) is not None


def meet(brought: Any) -> Any:
    """Wait until every function has come to a meeting; returns what came of it for this one."""
    return _here.turn.wait(brought)


def run_in_turns(functions: Sequence[Callable[[], Any]], together: Meet, world: Sequence[Swap] = ()) -> list[Any]:
    """Run functions to their ends, each as far as it goes before the next; returns what they return.

    Args:
        functions: they may call `meet`, all of them as often. The threads that they run on begin with the caller's
            mode of gradients, hooks on saved tensors, device and stream.
        together: called on the caller's thread with what each function brought to a meeting; gives what each gets.
        world: what of the global state belongs to a function as long as it has its turn.

    Raises:
        Exception: the first that a function raises, once all others have ended.

    Example:
        >>> def counted(number):
        ...     return meet(number) + meet(10 * number)
        >>> run_in_turns([lambda: counted(1), lambda: counted(2)], lambda brought: [sum(brought)] * 2)
        [33, 33]
    """
    inside, world = _like_here(), (*_EVERYWHERE, *world)
    turns = [_Turn(function, inside, world) for function in functions]
    try:
        for turn in turns:
            turn.go_on()
        while waiting := [turn for turn in turns if not turn.has_ended]:
            for turn, got in zip(waiting, together([turn.brought for turn in waiting]), strict=True):
                turn.got = got
            for turn in waiting:
                turn.go_on()
    finally:
        for turn in turns:
            turn.end()
    return [turn.result for turn in turns]


class _Turn:
    """A function on its thread."""

    def __init__(self, function: Callable[[], Any], inside: Callable[[], None], world: Sequence[Swap]) -> None:
        self._function, self._inside, self._world = function, inside, world
        self._kept: list[Any] | None = None
        self._may_run, self._has_stopped, self._is_over = threading.Semaphore(0), threading.Semaphore(0), False
        self.brought: Any = None
        self.got: Any = None
        self.result: Any = None
        self.has_ended = False
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let the function run until it waits or ends.

        Raises:
            Exception: what the function raised.
        """
        outside = [read() for read, _ in self._world]
        if self._kept is not None:
            self._put(self._kept)
        self._may_run.release()
        self._has_stopped.acquire()
        self._kept = [read() for read, _ in self._world]
        self._put(outside)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Have the thread ended; a function that waits is left by an exception."""
        if not self.has_ended:
            self._is_over = True
            self.go_on()
        self._thread.join()

    def wait(self, brought: Any) -> Any:
        """On the function's thread: until its next turn."""
        self.brought = brought
        self._has_stopped.release()
        self._may_run.acquire()
        if self._is_over:
            raise _Ended
        got, self.got, self.brought = self.got, None, None
        return got

    def _put(self, values: Sequence[Any]) -> None:
        for (_, write), value in zip(self._world, values, strict=True):
            write(value)

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self._is_over:
                _here.turn = self
                self._inside()
                self.result = self._function()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        self.has_ended = True
        self._has_stopped.release()


def _like_here() -> Callable[[], None]:
    """What a new thread calls to begin as this one is."""
    grad, hooks = torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False)
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def begin() -> None:
        if stream is not None:
            torch.cuda.set_stream(stream)  # and its device
        torch.set_grad_enabled(grad)
        if hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    return begin
