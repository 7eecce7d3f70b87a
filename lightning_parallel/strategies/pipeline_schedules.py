"""Which schedule a pipeline runs, and which part of it a rank does.

The one idea: what the user gave (a name, "auto", a file or an object) becomes one `Schedule` for every number of
micro-batches; ranks, rows and stages follow from it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.mesh import grid
from lightning_parallel.pipeline import schedules
from lightning_parallel.pipeline.partition.layout import Partition
from lightning_parallel.pipeline.planning.auto import Wanted, choose_together
from lightning_parallel.pipeline.runtime.assembly import rows_by_rank
from lightning_parallel.pipeline.runtime.engine import Engine
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules.spec import options_of
from lightning_parallel.pipeline.token_slices.lengths import Slices
from lightning_parallel.strategies.pipeline_checkpoints import PipelineCheckpoints

# Arguments (by attribute) of which a schedule of token slices goes with these values alone.
_WITH_SLICES: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "block"), "cuda_graphs": (False,), "dynamic_shapes": (False,), "skip_connections": (False,),
    "gather_once_a": ("step",), "sequence_parallel": (False,), "batch_norm": ("microbatch",),
}  # fmt: skip


class PipelineSchedules(PipelineCheckpoints):
    """The part of a pipeline strategy that knows its schedule; the arguments are `PipelineStrategy`'s."""

    schedule: str | Schedule
    num_microbatches: int | None
    blocks: str | Sequence[str]
    partition: Partition
    stages: Mapping[str, int] | None
    memory_limit: float | None
    cuda_graphs: bool
    slices: int | Sequence[int] | None
    _schedules: dict[tuple[int, bool], Schedule]
    _seconds: Mapping[str, float] | None = None  # of every unit, where they were measured to choose a schedule

    @property
    def num_ranks(self) -> int:
        """How many ranks hold a copy of the model."""
        return self.axis_size("pipeline")

    @property
    def num_stages(self) -> int:
        """Into how many stages the model is cut: as many as ranks, or a multiple."""
        return self._full_schedule().num_stages

    @property
    def row(self) -> int:
        """The row of the schedule that this rank runs: the last stage's is that of global rank 0, which logs."""
        return rows_by_rank(self._full_schedule())[self.axis_rank("pipeline")]

    @property
    def stages_held(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(stage for _, stage in self._full_schedule().stages_of(self.row))

    @property
    def stage(self) -> int:
        """The stage of this rank, the first one where it holds several."""
        return self.stages_held[0]

    @property
    def at_loss(self) -> bool:
        """Whether this rank holds the last stage, where steps end."""
        return self.axis_rank("pipeline") == 0

    def schedule_for(self, num_microbatches: int, training: bool = True) -> Schedule:
        """The schedule of a batch of so many micro-batches, forwards only in evaluation.

        Raises:
            ValueError: a schedule given as an object or a file is for another number of stages.
        """
        key = (num_microbatches, training)
        if key not in self._schedules:
            schedule = self._make_schedule(num_microbatches)
            self._schedules[key] = schedule if training else schedule.whole().forward_only()
        return self._schedules[key]

    def schedule_of(self, signatures: Sequence[Hashable], training: bool) -> Schedule:
        """The schedule of micro-batches of these signatures: whole sequences, until they can be cut into slices."""
        schedule = self.schedule_for(len(signatures), training)
        return schedule if self.pipeline.cuts_sequences(signatures) else schedule.whole()

    def _make_schedule(self, num_microbatches: int) -> Schedule:
        assert self.schedule != "auto", "chosen at set-up"
        if isinstance(self.schedule, str):
            return self._make_by_name(self.schedule, num_microbatches)
        if self.schedule.num_ranks != self.num_ranks:
            raise ValueError(
                f"Schedule {self.schedule.name!r} is for {self.schedule.num_ranks} ranks, but this run has"
                f" {self.num_ranks}. Use Trainer(devices={self.schedule.num_ranks}), or give a schedule by name."
            )
        return self.schedule.first(num_microbatches)

    def _make_by_name(self, name: str, num_microbatches: int) -> Schedule:
        """A batch too small for the schedule's rule is run in the order of a full one."""
        full = self._default_microbatches()
        options = {} if self.slices is None else {"slices": Slices.of(self.slices).number}
        try:
            return schedules.make(name, self.num_ranks, num_microbatches, **options)
        except ValueError:
            if num_microbatches >= full:
                raise
        return schedules.make(name, self.num_ranks, full, **options).first(num_microbatches)

    def _choose_schedule(self) -> None:
        """Measure on global rank 0, and run what it chooses for the rest of this strategy's life."""
        assert self.lightning_module is not None
        wanted = Wanted(
            self.num_ranks, self._default_microbatches(), self.blocks, self.partition, self.stages, self.memory_limit
        )
        pair = grid(self.axes(), ("data", "tensor", "pipeline"))[0, 0, :2].tolist()
        with self.blocked("rank 0 to time the model"):
            choice = choose_together(
                self.lightning_module,
                wanted,
                self.root_device,
                pair,
                self.broadcast,
                self.precision_plugin.train_step_context,
            )
        self.schedule, self._seconds = choice.schedule, choice.seconds
        rank_zero_info(f'PipelineStrategy(schedule="auto") takes {choice.reason} (in seconds and bytes)')

    def _refuse_schedule(self, schedule: Schedule) -> None:
        """Raise for a schedule that cannot be run, or not with the other arguments."""
        Engine.refuse(schedule)
        self._refuse_slices()
        if self.cuda_graphs and self.root_device.type != "cuda":
            raise ValueError(
                f"PipelineStrategy(cuda_graphs=True) runs on GPUs, but this run is on {self.root_device.type}. Use"
                ' Trainer(accelerator="cuda"), or cuda_graphs=False.'
            )

    def _refuse_slices(self) -> None:
        """Raise for arguments that do not go with token slices, or with whole sequences."""
        if not self._is_sliced():
            if self.slices is not None:
                raise ValueError(
                    f"{type(self).__name__}(slices={self.slices!r}) goes with a schedule of token slices, which"
                    f' {self.schedule!r} is not. Use schedule="terapipe", or leave slices out.'
                )
            return
        for name, possible in _WITH_SLICES.items():
            given, argument = getattr(self, name, possible[0]), name.removesuffix("_once_a")
            if given not in possible:
                raise ValueError(
                    f"{type(self).__name__}({argument}={given!r}) does not go with a schedule of token slices. Use"
                    f" {' or '.join(f'{argument}={value!r}' for value in possible)}, or a schedule of whole sequences."
                )
        if isinstance(self.schedule, Schedule) and self._token_slices(self.schedule).number != self.schedule.num_slices:
            raise ValueError(
                f"{type(self).__name__}(slices={self.slices!r}) are {self._token_slices(self.schedule).number} slices,"
                f" and schedule {self.schedule.name!r} has {self.schedule.num_slices}. Give as many."
            )

    def _is_sliced(self) -> bool:
        if isinstance(self.schedule, Schedule):
            return self.schedule.num_slices > 0
        return self.schedule != "auto" and "slices" in options_of(schedules.find(self.schedule)[0])

    def _token_slices(self, schedule: Schedule) -> Slices:
        return Slices.of(self.slices if self.slices is not None else schedule.num_slices)

    def _full_schedule(self) -> Schedule:
        """The schedule of a full batch."""
        return self.schedule_for(self._default_microbatches())

    def _default_microbatches(self) -> int:
        if not isinstance(self.schedule, str):
            return self.schedule.num_microbatches
        return self.num_microbatches or 4 * self.num_ranks
