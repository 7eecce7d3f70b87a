"""`PipelineStrategy`: an unmodified LightningModule trains as a pipeline.

The one idea: a Trainer step becomes a run of a schedule. `training_step` cuts the batch into micro-batches, runs this
rank's actions and returns the loss; the gradients it made are kept aside (Lightning zeroes gradients between the
forward and `backward`) and `backward` adds them to `p.grad`. Everything else (hooks, clipping, optimizers, schedulers,
logging) stays where Lightning has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parallel.checkpoint.full import PrunedOptimizer
from lightning_parallel.failure.patience import Patience
from lightning_parallel.parallel.batch_statistics import AddUp
from lightning_parallel.pipeline.batch.fields import BatchFields, FieldKind, FieldMemory
from lightning_parallel.pipeline.batch_norm.microbatch_norm import DeferredBatchNorm
from lightning_parallel.pipeline.batch_norm.whole_batch_norm import WholeBatchNorm
from lightning_parallel.pipeline.parameters.deferred_init import without_memory
from lightning_parallel.pipeline.partition.layout import Partition
from lightning_parallel.pipeline.runtime.stats import PipelineRecorder
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.stage.cut import Recompute
from lightning_parallel.pipeline.stage.random_streams import share_generators
from lightning_parallel.strategies.arguments import read_schedule
from lightning_parallel.strategies.base import StartMethod
from lightning_parallel.strategies.pipeline_arguments import LossWeight, refuse_pipeline_arguments
from lightning_parallel.strategies.pipeline_building import PipelineBuilding
from lightning_parallel.trainer.failure.reports import trainer_of
from lightning_parallel.trainer.metrics.step_metrics import StepMetrics
from lightning_parallel.trainer.refusals import refuse_optimizers, refuse_saving_pretrained, refuse_unsupported
from lightning_parallel.trainer.state.late_restore import LateRestore
from lightning_parallel.trainer.state.optimizer_states import share_methods, states_to_device
from lightning_parallel.trainer.state.prediction_writers import hold_writers, let_writers_go
from lightning_parallel.trainer.state.weight_callbacks import cut_copies, refuse_sharded
from lightning_parallel.trainer.step.log_spreader import LogSpreader
from lightning_parallel.trainer.step.loss_scale import LossScale
from lightning_parallel.trainer.step.repeated_calls import RepeatedCalls
from lightning_parallel.trainer.step.two_directions import Directions

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PipelineStrategy(PipelineBuilding):
    """Cuts the model into stages, one a rank, and runs every batch as micro-batches by a schedule.

    The LightningModule is used as it is. Global rank 0 holds the last stage: loss, logging and progress bar are real
    there, and what a step logs is logged on every rank. Equal to one process that runs the same micro-batches and
    averages them.

    Args:
        schedule: a name ("1f1b", "interleaved_1f1b:v=3", "zb_v"; see docs/schedules.md), the path of a CSV file of
            actions, or a `Schedule`. Some hold several stages a rank, and cut the model into as many; some ("chimera",
            "dualpipe", "gems") hold each stage on several ranks, whose gradients are summed. "auto" times the model's
            units on one rank before the first step (they need the module's `example_input_array`, a micro-batch) and
            takes the schedule whose step should be shortest with the stages that it would have; rank 0 prints why.
        num_microbatches: M; default 4 a stage (GPipe's rule for a small bubble). Batches of fewer rows use fewer.
        blocks: where the model may be cut: "auto" (the longest chain of submodules), a container's name, or block
            names.
        partition: how blocks are dealt to stages: balanced by "parameters", "flops" or measured "time" (both of these
            need the module's `example_input_array`, a micro-batch), by "count", or a list of counts.
        stages: {module name: stage} for modules outside the blocks that the order of registration places wrongly.
        loss_weight: weight of a micro-batch in the loss and in logged means; default its rows.
        memory_limit: bytes of activations that a rank may hold, for schedule="auto".
        check_loss: compare what every stage makes of the first batch (of training, of validation, ...) with what it
            makes of its micro-batches, and raise if they differ; warn of logged numbers that do, and raise if a
            micro-batch reads tensors that another left in attributes. What goes whole to every micro-batch without
            being declared in `batch_fields` has to be the same in all batches.
        batch_fields: {name: "rows" or "whole"}: what a field of the batch is that its shape does not tell. "rows" has
            one entry a row, or as many for every row, row by row; "whole" means the same to any rows and goes whole to
            every micro-batch. A name is a key, a position in a tuple or an attribute, nested ones joined by dots
            ("inputs.mask", "1"). Default: what has as many entries as the batch has rows is cut, the rest is whole.
        dynamic_shapes: agree on every transfer anew, for models whose shapes do not follow from the batch's. A step may
            then call the model once.
        skip_connections: let a stage use what any earlier stage's block returned (U-Nets, encoder-decoders, losses on
            features of the middle): sent straight to the stages that use it. Which these are is found on one
            micro-batch of every signature, which goes through all stages once more than it is trained on.
        receive_ahead: how many coming actions have their receives posted early; default 1 on CPU, 0 on GPUs.
        recompute: what the backward computes again instead of keeping it: "none", what lies inside a "block", or the
            whole "stage" but for what came in, as GPipe does (on the last stage, which makes the loss, the blocks).
        batch_norm: what batch norms in training mode normalise by: each "microbatch", or the whole "batch", as one
            process does. For the latter a stage with norms runs all forwards before its backwards, as schedule="gpipe"
            does: its micro-batches wait for each other at every norm. With `Trainer(sync_batchnorm=True)` the batches
            of all copies count as one.
        cuda_graphs: launch every block as CUDA graphs from the second step on, for micro-batches so small that the host
            takes longer to launch a block than the GPU to compute it. Shapes must follow from the batch's, and what is
            Python in a block happens once, at capture. Blocks with hooks run as they are.
        slices: into how many pieces schedule="terapipe" cuts every sequence, or the tokens of each piece, which add up
            to the sequences' length; default 4 of equal length.
        data_parallel_size: copies of the model side by side, each a pipeline over its share of the ranks and of the
            rows; gradients are averaged over them. The ranks of a copy are neighbours.
        state_dict_type: "full" saves one file as one process does; "sharded" a folder into which every rank writes its
            part, for models that no host can hold (`lightning-parallel consolidate` makes one file of it). Either is
            resumed from, whichever is set.
        start_method, timeout, patience, **kwargs: see `MeshStrategy`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = PipelineStrategy(schedule="1f1b", num_microbatches=8)
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy)  # doctest: +SKIP

    Source:
        Huang et al., GPipe, arXiv 1811.06965; Narayanan et al., PipeDream, arXiv 1806.03377 (1F1B).
    """

    def __init__(
        self,
        schedule: str | Path | Schedule = "1f1b",
        num_microbatches: int | None = None,
        blocks: str | Sequence[str] = "auto",
        partition: Partition = "parameters",
        stages: Mapping[str, int] | None = None,
        loss_weight: LossWeight | None = None,
        memory_limit: float | None = None,
        check_loss: bool = True,
        batch_fields: Mapping[str, FieldKind] | None = None,
        dynamic_shapes: bool = False,
        skip_connections: bool = False,
        receive_ahead: int | None = None,
        recompute: Recompute = "none",
        batch_norm: Literal["microbatch", "batch"] = "microbatch",
        cuda_graphs: bool = False,
        slices: int | Sequence[int] | None = None,
        data_parallel_size: int = 1,
        state_dict_type: Literal["full", "sharded"] = "full",
        start_method: StartMethod = "popen",
        timeout: timedelta = timedelta(minutes=30),
        patience: Patience | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(state_dict_type, start_method=start_method, timeout=timeout, patience=patience, **kwargs)
        self.data_parallel_size = data_parallel_size
        self.num_microbatches, self.blocks, self.partition, self.stages = num_microbatches, blocks, partition, stages
        self.loss_weight, self.check_loss, self.dynamic_shapes = loss_weight, check_loss, dynamic_shapes
        self.skip_connections, self.memory_limit = skip_connections, memory_limit
        self.receive_ahead, self.recompute, self.cuda_graphs = receive_ahead, recompute, cuda_graphs
        self.slices, self.batch_norm = slices, batch_norm
        refuse_pipeline_arguments(self, schedule, batch_fields)
        self.schedule = read_schedule(schedule, num_microbatches)
        self._refuse_slices()
        self.batch_fields = BatchFields(batch_fields)
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._forget_comparisons()
        self._metrics: StepMetrics | None = None
        self._loss_scale: LossScale | None = None
        self.stats: PipelineRecorder | None = None
        self._restore: LateRestore | None = None

    def axes(self) -> Mapping[str, int]:
        if self.data_parallel_size == 1:
            return {"pipeline": self.world_size}
        return {"data": self.data_parallel_size, "pipeline": max(1, self.world_size // self.data_parallel_size)}

    # -- set-up and teardown -------------------------------------------------------------------------------------------

    @contextmanager
    def model_sharded_context(self) -> Any:
        """`configure_model` builds parameters without memory; `setup` gives a rank its own."""
        with without_memory() if self.num_ranks > 1 else nullcontext():
            yield

    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        self._restore = LateRestore(self.lightning_module.trainer)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.let_host_run_ahead(trainer)
        refuse_unsupported(trainer, self)
        self.model = self.precision_plugin.convert_module(self.lightning_module)  # before its units are timed
        if self.schedule == "auto":
            self._choose_schedule()
        self._refuse_schedule(self._full_schedule())
        assert self.watch is not None
        self.watch.stage = self.stage
        with self.opening_groups():
            self._pipeline = self._assemble()
        if self.state_dict_type == "sharded":
            refuse_sharded(trainer, self.lightning_module, type(self).__name__)
        cut_copies(trainer, self.lightning_module, self.pipeline.table, self.tensor, self._whole)
        self._prepare_steps(self.lightning_module)
        share_generators(self.broadcast)
        self._set_up_states(trainer)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        if self.lightning_module.example_input_array is not None:
            self.precision_plugin.forward_context = self._forward_context  # type: ignore[method-assign]
        hold_writers(trainer, self.at_loss)
        if self.num_ranks > 1 or self.axis_size("tensor") > 1:
            share = "stage of the model" if self.num_ranks > 1 else "part of what tensor_plan cuts"
            refuse_saving_pretrained(self.lightning_module, share, "Call")
        assert self._restore is not None
        self._restore()

    def _prepare_steps(self, module: LightningModule) -> None:
        """What goes along with the steps of the pipeline, which is assembled."""
        pipeline, cut = self.pipeline, self.pipeline.cut
        self.stats = PipelineRecorder(
            self._full_schedule(), pipeline.first_ranks, pipeline.clock, pipeline.all_gather_of_first,
            cut.layout.shares, pipeline.row,
        )  # fmt: skip
        add_up = pipeline.add_up_over_holders if pipeline.num_replicas > 1 else None
        self._batch_norm = (
            WholeBatchNorm(module, cut, pipeline.held_stages, self._sums_of_norms())
            if self.batch_norm == "batch" or self._layer_sync is not None
            else DeferredBatchNorm(module, cut, add_up)
        )
        self.directions = Directions(pipeline)
        self._metrics = StepMetrics(module, pipeline)
        self.repeats = RepeatedCalls(module, pipeline, self.metrics, possible=not self.dynamic_shapes)
        self._loss_scale = LossScale(self.precision_plugin, self._sum_over_parts, self.root_device)
        self.spreader = LogSpreader(pipeline, self.metrics.hear)
        self._forget_comparisons()

    def _sums_of_norms(self) -> AddUp | None:
        """What sums the batch norms' statistics over the copies of the model, if that is wanted."""
        data = self.pipeline.data
        return data.add_up if self._layer_sync is not None and data.size > 1 else None

    def _forget_comparisons(self) -> None:
        """No step was compared with the whole batch yet."""
        self._loss_checked = False
        self.compared: set[str] = set()
        self._memories: dict[tuple[str, int], FieldMemory] = {}

    def _set_up_states(self, trainer: Trainer) -> None:
        """Optimizers, where there is training, and what the precision needs."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            share_methods(self._lightning_optimizers)
            self._states_to_device()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call `configure_optimizers` as it is, then leave each group this rank's parameters."""
        super().setup_optimizers(trainer)
        refuse_optimizers(self)
        agree = partial(self.pipeline.check_same, "groups")
        self._pruned = {
            id(opt): PrunedOptimizer(opt, self.pipeline.table, agree, self.tensor) for opt in self.optimizers
        }

    def model_to_device(self) -> None:
        self.pipeline.to_device(self.root_device)

    def teardown(self) -> None:
        for replaced in ("clip_grad_by_norm", "forward_context"):
            self.precision_plugin.__dict__.pop(replaced, None)
        failed = self.failed
        if self._restore is not None:
            self._restore.end()
        if (trainer := trainer_of(self)) is not None:
            let_writers_go(trainer)
        if self._loss_scale is not None:
            self._loss_scale.release()
        if self._metrics is not None:
            self.metrics.release(failed)
            self._metrics = None
        if self._pipeline is not None:
            self.tensor.make_whole(failed)
        super().teardown()
        if self._pipeline is not None:
            self.pipeline.close()
            self.tensor.release()
            for pruned in self._pruned.values():
                pruned.release()
            if not failed or self.root_device.type == "cpu":  # after a failure the device may never answer
                states_to_device(self.optimizers, torch.device("cpu"))
                self.pipeline.to_device(torch.device("cpu"))
