"""Log what moves between ranks in a training step, beside what the stage of ZeRO says and what it should take."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel.callbacks.logged import log_measured
from lightning_parallel.callbacks.stats import EveryNSteps, axis_of, log_every_n_steps, runs_pipeline
from lightning_parallel.measure.collective_costs import COLLECTIVES, Link, estimate
from lightning_parallel.measure.communication import CommunicationWatch, Key, Moved, volume

_PROBES = (1, 1 << 21)  # float32 elements of the all-reduces from which latency and transfer are taken


class CommunicationMonitor(Callback):
    """Logs bytes and seconds by axis, collective and phase, to every logger; each rank's own, rank 0's are shown.

    Keys:

    * ``parallel/communication_bytes/AXIS/COLLECTIVE/PHASE``: of the whole vectors, as the paper counts (gloo sends
      more); phases are forward, backward and step. What stages send each other is
      ``pipeline/send/forward``: a step's backwards run in its forward;
    * ``parallel/communication_seconds/AXIS/COLLECTIVE/PHASE``: from the call to the end (on a CPU, until somebody has
      waited for it), added up; what overlaps with computation takes no time of its own. Beside it, as
      ``communication_seconds_estimate``, latency, transfer and reduction by the alpha-beta-gamma model;
    * ``parallel/communication_moved``: bytes of all reduce-scatters (DeepSpeed: reduces, each to the rank that owns the
      part) and all-gathers along the data axis; what groups of a ``shard_size`` average between them is on an axis
      ``replicas``;
      ``parallel/communication_moved_formula``: 2P, 2P or 3P of stage 1, 2 or 3 (with k micro-batches a step, whose
      gradients stages 2 and 3 reduce every time, (1+k)P and 3kP). Measured exceeds it by padding. On a mesh P is of
      rank 0's stages, stage 3 gathers as often as it was told to, and what is logged is rank 0's.

    A step is measured if it will be logged. Other steps cost two comparisons.

    Args:
        every_n_steps: measure and log once in so many optimizer steps; None is the Trainer's ``log_every_n_steps``.
        link: what a message, a byte sent and a byte added cost; None measures two all-reduces when training starts.

    Raises:
        ValueError: ``every_n_steps`` is below 1; at setup, the Trainer's strategy has parameter servers.

    Example::

        monitor = CommunicationMonitor()
        trainer = Trainer(strategy="zero_2", devices=4, callbacks=[monitor])
        trainer.fit(model)
        print(monitor.summary())
    """

    measured_attributes = ("link", "last", "backwards", "_formula", "_sizes")  # rank 0's come back from forked ranks

    def __init__(self, every_n_steps: int | None = None, link: Link | None = None) -> None:
        self.link, self.last, self.backwards = link, dict[Key, Moved](), 0
        self._is_due = EveryNSteps(self, every_n_steps)
        self._watch: CommunicationWatch | None = None
        self._formula: dict[str, int] = {}
        self._sizes: dict[str, int] = {}  # ranks along each axis

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy whose ranks do not talk by collectives."""
        if hasattr(trainer.strategy, "versions"):
            raise ValueError(
                f"{type(self).__name__} measures collectives, and workers of {type(trainer.strategy).__name__} talk to"
                " servers. Use StalenessMonitor, which logs the bytes that they push and pull, or remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last ``fit``, and measure the link."""
        self._is_due = EveryNSteps(self, self._is_due.every_n_steps)
        self.last, self._formula = {}, {}
        if self.link is None and _ranks() > 1:
            self.link = measure_link(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to watch, where the step will be logged."""
        if self._watch is None and self._is_due.is_coming(
            trainer.global_step, log_every_n_steps(trainer), _ahead(trainer)
        ):
            self._watch, self.backwards = CommunicationWatch(_noting_sizes(axis_of(trainer), self._sizes)), 0
            self._watch.__enter__()
        self._phase("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """From here on it is the backward."""
        self.backwards += 1
        self._phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on it is the step."""
        self._phase("step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was watched, when the optimizer has stepped."""
        if not self._is_due(trainer.global_step, log_every_n_steps(trainer)) or self._watch is None:
            return
        self._close()
        states = getattr(trainer.strategy, "model_states", lambda: None)()
        self._formula = states.volume(self.backwards) if states is not None and states.stage else {}
        values = self.metrics()
        if runs_pipeline(trainer):  # ranks of different stages move different bytes; what is logged is rank 0's
            values = trainer.strategy.broadcast(values)
        log_measured(trainer, values)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the names of torch.distributed as they were."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same where a step failed."""
        self._close()

    def metrics(self) -> dict[str, float]:
        """The last measured step under its log keys."""
        values: dict[str, float] = {}
        for (axis, collective, phase), moved in self.last.items():
            where = f"{axis}/{collective}/{phase}"
            values[f"parallel/communication_bytes/{where}"] = float(moved.nbytes)
            values[f"parallel/communication_seconds/{where}"] = moved.seconds
            if self.link is not None and collective in COLLECTIVES:
                ranks = self._sizes.get(axis, _ranks())
                expected = moved.calls * estimate(collective, ranks, moved.nbytes / moved.calls, self.link)
                values[f"parallel/communication_seconds_estimate/{where}"] = expected
        values["parallel/communication_moved"] = float(sum(volume(self.last).values()))
        if self._formula:
            values["parallel/communication_moved_formula"] = float(sum(self._formula.values()))
        return values

    def summary(self) -> str:
        """The last measured step in words."""
        if not self.last:
            return "communication: no step was measured"
        parts = [
            f"{m.calls} {collective} of {m.nbytes} bytes in the {phase}, {1e3 * m.seconds:.2f} ms"
            for (axis, collective, phase), m in self.last.items()
            if axis == "data"
        ]
        moved = f"moved {sum(volume(self.last).values())} bytes"
        beside = f" beside {sum(self._formula.values())} by the formula" if self._formula else ""
        return f"communication: {moved}{beside}: {'; '.join(parts)}"

    def _phase(self, phase: str) -> None:
        if self._watch is not None:
            self._watch.phase = phase

    def _close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
            self.last = watch.moved()


def measure_link(device: torch.device, repeats: int = 3) -> Link:
    """Latency and transfer of the default group, from a small and a large all-reduce; all ranks call it."""
    seconds = []
    for numel in _PROBES:
        probe = torch.zeros(numel, device=device)
        dist.all_reduce(probe)
        seconds.append(min(_seconds_of(partial(dist.all_reduce, probe), device) for _ in range(repeats)))
    ranks, (small, large) = _ranks(), seconds
    alpha = small / (2 * (ranks - 1))
    beta = max(0.0, large - small) / (2 * (ranks - 1) / ranks * 4 * _PROBES[1])
    return Link(alpha, beta)


def _seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _noting_sizes(axis_of: Callable[[Any], str], sizes: dict[str, int]) -> Callable[[Any], str]:
    """The same names; notes how many ranks there are along each axis."""

    def noted(group: Any) -> str:
        axis = axis_of(group)
        sizes[axis] = dist.get_world_size(group)
        return axis

    return noted


def _ahead(trainer: Trainer) -> int:
    return max(1, len(trainer.optimizers))
