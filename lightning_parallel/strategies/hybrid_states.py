"""The steps of a pipeline whose copies along the data axis divide states as ZeRO's stages 1, 2 and 3 say.

The one idea: a pipeline's step stays what it is; where it averages gradients over the copies of the model they are
reduced to parts, and in stage 3 parameters are made whole around it. Left out: how (``zero/native/stage_states.py``),
and what is saved (``hybrid_checkpoints.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_parallel.pipeline.gradients.early_sums import Round
from lightning_parallel.pipeline.parameters.deferred_init import without_memory
from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.strategies.arguments import is_positive, refuse_arguments
from lightning_parallel.strategies.gathered_steps import GatheredSteps
from lightning_parallel.trainer.failure.reports import trainer_of
from lightning_parallel.trainer.refusals import refuse_saving_pretrained
from lightning_parallel.trainer.state.weight_callbacks import before_evaluations_end, let_evaluations_end, model_copies
from lightning_parallel.zero.expected_bytes import ModelStates, undivided
from lightning_parallel.zero.gather.late_reads import LateReads
from lightning_parallel.zero.native.gathered_bucket import GatheredBucket
from lightning_parallel.zero.native.partition import Options
from lightning_parallel.zero.native.stage_states import StageStates
from lightning_parallel.zero.optimizer.elementwise import refuse_optimizer

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


Gather = Literal["step", "microbatch"]


class DividedPipeline(GatheredSteps):
    """A pipeline whose copies along the data axis divide the states of the stages that they hold alike.

    Args:
        zero_stage: 0 divides nothing, 1 optimizer states, 2 gradients too (between steps), 3 parameters too.
        gather: with `zero_stage=3`, how often parameters are gathered: once a "step", or for the forward and for the
            backward of every "microbatch", block by block.
        bucket_mb: megabytes of gradients that are reduced at a time.
        master_weights: with parameters of 16 bits, let the optimizer update a divided copy of 32 bits.
        offload: keep optimizer states, and that copy, in the host's memory, and update there.
        **kwargs: see `PipelineStrategy`.
    """

    def __init__(
        self, zero_stage: int = 0, gather: Gather = "step", bucket_mb: float = 128.0, master_weights: bool = True,
        offload: bool = False, cuda_graphs: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(zero_stage, cuda_graphs=cuda_graphs, **kwargs)
        refuse_arguments(
            self,
            zero_stage=(zero_stage, zero_stage in (0, 1, 2, 3) and not isinstance(zero_stage, bool), "0, 1, 2 or 3"),
            gather=(
                gather,
                gather == "step" or (gather == "microbatch" and zero_stage == 3 and self.batch_norm == "microbatch"),
                '"step", or "microbatch" with zero_stage=3 and batch_norm="microbatch"',
            ),
            bucket_mb=(bucket_mb, is_positive(bucket_mb) and isfinite(bucket_mb), "a size above 0"),
            master_weights=(master_weights, isinstance(master_weights, bool), "True or False"),
            offload=(
                offload,
                offload is False or (offload is True and zero_stage > 0),
                "False, or True with zero_stage",
            ),
            cuda_graphs=(
                cuda_graphs,
                not (cuda_graphs and zero_stage == 3),
                "False with zero_stage=3: a graph reads parameters where they lay when it was captured",
            ),
        )
        self.gather_once_a, self.bucket_mb = gather, bucket_mb
        self.master_weights, self.offload = master_weights, offload
        self.early_sums = zero_stage == 0
        self._may_save: Callable[[], None] | None = None  # lets `save_pretrained` write again

    # -- set-up and teardown -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        self._states, self._released, self._evaluates, self._learnt = None, False, False, set()
        self._may_save = None
        self.windows = None
        super().setup(trainer)
        if self._states is not None and self.num_ranks == 1 and self.axis_size("tensor") == 1 and self.zero_stage == 3:
            assert self.lightning_module is not None
            share = "share of every parameter"
            self._may_save = refuse_saving_pretrained(self.lightning_module, share, "Call it behind fit, or")
        if trainer.state.fn != TrainerFn.FITTING and self._states is None and self._divides_evaluations(trainer):
            self._divide(self.pipeline).divide([parameter for _, parameter in self.pipeline.own])

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        pipeline, name = self.pipeline, type(self).__name__
        if self.zero_stage and pipeline.data.size == 1:
            rank_zero_warn(f"{name}(zero_stage={self.zero_stage}) divides nothing: the data axis has one rank.")
        if not self.zero_stage or pipeline.data.size == 1:
            return
        for optimizer in self.optimizers:
            refuse_optimizer(optimizer, name)
        states = self._divide(pipeline) if self._states is None else self._states
        for pruned in self._pruned.values():
            pruned.unguard()
        states.partition.take(self.optimizers)
        if self.zero_stage == 3:
            self._divide_copies(trainer, states)
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
            # Lightning takes a fused optimizer for one that unscales gradients, though here nothing scales them.
            plugin.clip_gradients = partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]

    def _divides_evaluations(self, trainer: Trainer) -> bool:
        """Whether an evaluation without `fit` gathers for every micro-batch; what gathers once would hold all of it."""
        pipeline, module = self.pipeline, self.lightning_module
        assert module is not None
        whole = pipeline.data.size == 1 or pipeline.num_replicas > 1 or model_copies(trainer, module)
        return self.gather_once_a == "microbatch" and not whole

    def _divide(self, pipeline: Pipeline) -> StageStates:
        """What divides states of the stages of a pipeline, which may be about to be assembled; nothing is so far."""
        assert self.watch is not None and self.lightning_module is not None
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        host = torch.device("cpu") if self.offload and fits else None
        nbytes = max(1, int(self.bucket_mb * 2**20))
        options = Options(self.zero_stage, nbytes, self.master_weights and fits, host)
        by_block = self.gather_once_a == "microbatch"
        with self.opening_groups():
            reductions = pipeline.open_sum_group()
            reads = pipeline.open_sum_group("gloo") if by_block else None
        self._states = states = StageStates(
            pipeline.table,
            [],
            pipeline.data,
            options,
            self.blocked,
            by_block,
            reductions,
            pipeline.comes_unseen,
            LateReads(reads, self.blocked).meet,
        )
        self.windows = states.windows if by_block else None
        return states

    def _divide_early(self, pipeline: Pipeline, parameters: Sequence[nn.Parameter]) -> None:
        """A stage is built: divide what was just made of it, before more is."""
        (self._divide(pipeline) if self._states is None else self._states).divide(parameters)

    def divides_early(self) -> Callable[[Pipeline, Sequence[nn.Parameter]], None] | None:
        module = self.lightning_module
        assert module is not None
        fits = module.trainer.state.fn == TrainerFn.FITTING
        divides = self.zero_stage == 3 and (fits or self.gather_once_a == "microbatch")
        return self._divide_early if divides and not model_copies(module.trainer, module) else None

    @contextmanager
    def model_sharded_context(self) -> Any:
        """`configure_model` builds parameters without memory, where a rank does not keep them whole."""
        with without_memory() if self.num_ranks > 1 or self.zero_stage == 3 else nullcontext():
            yield

    def _divide_copies(self, trainer: Trainer, states: StageStates) -> None:
        """Callbacks that average weights average this rank's parts."""
        assert self.lightning_module is not None
        for copied in model_copies(trainer, self.lightning_module):
            states.divide_copy(copied)
        before_evaluations_end(trainer, self.lightning_module, self._free_after_evaluation)

    def teardown(self) -> None:
        trainer = trainer_of(self)
        if trainer is not None:  # there is none in a process that only started the ranks
            let_evaluations_end(trainer)
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        if self.failed:
            self.prepare_saving()
        if self._may_save is not None:
            self._may_save()
        if self._states is not None and self.watch is not None and not self.failed:
            with self.blocked("the other ranks at the end of the run"):
                self._states.release()
            self._released = True
        elif self._states is not None:
            self._states.release(failed=True)
            self._released = True
        super().teardown()

    def prepare_saving(self) -> None:
        if self._states is not None:
            self._states.windows.abandon()

    # -- gradients --------------------------------------------------------------------------------------------------

    def sums_while_running(
        self, schedule: Schedule, is_settled: bool
    ) -> tuple[Round | None, Callable[[int], None] | None]:
        module = self.lightning_module
        assert module is not None
        if self._states is None or self.pipeline.sums is not None:
            return super().sums_while_running(schedule, is_settled)
        accumulates = self.zero_stage == 1 and module.trainer.accumulate_grad_batches > 1
        first = not self._loss_checked  # one copy might begin it anew, and another not
        self._states.windows.passed = None
        if first or accumulates or is_overridden("optimizer_zero_grad", module):
            return None, None
        return self._states.reduce_early(schedule)

    def _join_copies(self) -> None:
        if self._states is None:
            super()._join_copies()
        else:
            self._states.reduce(self._accumulating)

    def _pause(self) -> None:
        if self._states is None:
            super()._pause()
        else:
            self._states.pause()

    def _sum_over_parts(self, value: Tensor) -> None:
        super()._sum_over_parts(value)
        if self._states is not None:
            with self.blocked("the other copies of the model, to add up a norm"):
                dist.all_reduce(value, group=self.pipeline.data.group)

    # -- states --------------------------------------------------------------------------------------------------------

    def model_states(self) -> ModelStates:
        """What `zero_stage` promises this rank of its stages in bytes, for callbacks; after an optimizer's step."""
        if self._states is None:
            return undivided(self.optimizers, [parameter for _, parameter in self.pipeline.own])
        gathers = 1 if self.windows is None else 2 * self._default_microbatches()
        return self._states.promise(self.optimizers, gathers)

    def gathered_parameters(self) -> Sequence[Tensor]:
        """What holds whole parameters while stage 3 has gathered them, for callbacks that count memory."""
        return () if self._states is None else self._states.gathered()

    def watch_gathered(self, note: Callable[[int], None]) -> Callable[[], None]:
        """Have `note` called with the bytes of parameters that are gathered, and freed (below 0), until what it returns
        is called; for callbacks that count memory."""
        GatheredBucket.watchers.append(note)
        note(sum(flat.untyped_storage().nbytes() for flat in self.gathered_parameters()))
        return partial(GatheredBucket.watchers.remove, note)
