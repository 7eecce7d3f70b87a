"""Interleaved timing of programs in one process: blocks of steps in turn, a ratio a pair, median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


@dataclass
class Pairs:
    """Seconds a step of ours and of the peer's, block by block."""

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.peer, strict=False)]

    def report(self, name: str, bar: float) -> str:
        """One line: medians in ms, median ratio with its quartiles, and whether the bar is met."""
        ratios = sorted(self.ratios())
        low, _, high = statistics.quantiles(ratios, n=4)
        ours, peer, ratio = (statistics.median(x) for x in (self.ours, self.peer, ratios))
        verdict = "met" if ratio <= bar else "MISSED"
        return (
            f"{name}: ours {1e3 * ours:.2f} ms, peer {1e3 * peer:.2f} ms, ratio {ratio:.4f} (quartiles {low:.4f} .."
            f" {high:.4f}, {len(ratios)} pairs), bar {bar} {verdict}"
        )


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Interleave(Callback):
    """Inside `Trainer.fit`: after every `block` of the Trainer's steps, run as many of the peer's, and time both.

    Args:
        peer: makes the peer once the processes are connected; returns a function that runs one of its steps.
        block: steps of a block.
        pairs: how many pairs are kept after the warm-up pairs.
        warm_up: pairs that are thrown away.
        fence: lines the ranks up where a clock is read, so that a block ends when its slowest rank has ended.
    """

    def __init__(
        self,
        peer: Callable[[LightningModule], Any],
        block: int,
        pairs: int,
        warm_up: int = 3,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self.make_peer, self.block, self.pairs, self.warm_up, self.fence = peer, block, pairs, warm_up, fence
        self.result = Pairs()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peer_step = self.make_peer(pl_module)
        self._start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if (trainer.global_step % self.block) == 0:
            self._finish()
            self._start()

    @property
    def steps(self) -> int:
        """What `max_steps` has to be."""
        return self.block * (self.pairs + self.warm_up)

    def _start(self) -> None:
        self._began = self._now()

    def _now(self) -> float:
        synchronize()
        self.fence()
        return time.perf_counter()

    def _finish(self) -> None:
        ours = (self._now() - self._began) / self.block
        self._keep(self.result, ours, self._time(self.peer_step))
        self.warm_up = max(0, self.warm_up - 1)

    def _time(self, step: Callable[[], object]) -> float:
        """Seconds a step of a block of the peer's."""
        self._start()
        for _ in range(self.block):
            step()
        return (self._now() - self._began) / self.block

    def _keep(self, result: Pairs, ours: float, peer: float) -> None:
        if not self.warm_up:
            result.ours.append(ours)
            result.peer.append(peer)


class Rounds(Interleave):
    """Several peers: after each block of ours one of every peer's, in changing order; `peer` returns them by name."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peers: dict[str, Callable[[], object]] = self.make_peer(pl_module)
        self.results = {name: Pairs() for name in self.peers}
        self._first = 0
        self._start()

    def _finish(self) -> None:
        ours = (self._now() - self._began) / self.block
        names = list(self.peers)
        for name in names[self._first :] + names[: self._first]:
            self._keep(self.results[name], ours, self._time(self.peers[name]))
        self._first = (self._first + 1) % len(names)
        self.warm_up = max(0, self.warm_up - 1)
