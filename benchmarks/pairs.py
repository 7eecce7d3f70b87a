"""Interleaved timing of two programs in one process: blocks of steps in turn, a ratio a pair, median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
        peer: Callable[[LightningModule], Callable[[], None]],
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
        self._start()
        for _ in range(self.block):
            self.peer_step()
        peer = (self._now() - self._began) / self.block
        if self.warm_up:
            self.warm_up -= 1
        else:
            self.result.ours.append(ours)
            self.result.peer.append(peer)
