"""`HybridStrategy`: several axes of a mesh at once, data x pipeline x tensor, with ZeRO inside the data axis.

The one idea: there is one body for all layouts, the pipeline's step; where the pipeline axis has one rank the model is
one stage. The other axes are what they are elsewhere: ranks along `data` see different rows and average gradients,
ranks along `tensor` see the same rows. This class says how many ranks lie along which axis, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_parallel.degrees import AXES, Degrees, table
from lightning_parallel.parallel.axis import TensorAxis
from lightning_parallel.parallel.plan import Plan, is_plan
from lightning_parallel.parallel.tensor_parallel import TensorParallel
from lightning_parallel.pipeline.gradients.early_sums import Round, last_action
from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.strategies.arguments import refuse_arguments
from lightning_parallel.strategies.hybrid_states import DividedPipeline, Gather
from lightning_parallel.trainer.state.summaries import count_whole
from lightning_parallel.zero.activation_checkpoints import ShardedInputs
from lightning_parallel.zero.collectives import Traffic
from lightning_parallel.zero.optimizer.elementwise import refuse_optimizer

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class HybridStrategy(DividedPipeline):
    """Trains on a mesh of data x pipeline x tensor ranks.

    Equal to one process that sees all rows. At the start rank 0 prints which rank is where.

    Args:
        data_parallel_size: copies of the model that see different rows.
        pipeline_parallel_size: ranks over which the model's stages are dealt; 1 leaves it whole, and
            `num_microbatches` is then 1 by default.
        tensor_parallel_size: ranks that see the same rows and share a stage: each holds some heads of its attention,
            some features of its perceptrons and some rows of its vocabulary.
        tensor_plan: which modules are cut how. "auto" finds attention, perceptrons, embedding and head by their names
            and shapes, and takes what models of `transformers` say of themselves. Or {pattern of module names:
            "colwise" | "rowwise" | "vocab" | "summed"}, where `*` stands for one part of a dotted name.
        sequence_parallel: whether ranks along `tensor` hold slices of the sequence where they would otherwise compute
            the same (norms, dropout, residual sums). Blocks need a norm in front of attention and perceptron, and
            positions in dim 1, a multiple of the ranks.
        partition_activations: with `recompute="block"`, whether each rank along `tensor` keeps a part of a block's
            input (ZeRO's P_a), gathered when the block is computed again. `sequence_parallel` has done so already.
        loss_parallel: whether a head's logits stay apart on the ranks along `tensor` up to `F.cross_entropy`, which is
            then taken of the parts. Anything else that a step does with them gathers them: all ranks have to do it.
        overlap_sums: whether column-wise modules make weights' gradients while inputs' are summed along `tensor`,
            as Megatron does. It pays where these sums take long: it costs the host some time a module. Schedules that
            split backwards have it already put off.
        zero_stage: what the ranks along `data` divide of their stages' states, as ZeRO numbers it: 0 nothing, 1
            optimizer states, 2 gradients too (between steps), 3 parameters too.
        gather: with `zero_stage=3`, how often parameters are gathered: once a "step", or for the forward and for the
            backward of every "microbatch", block by block, which holds two blocks at a time and moves more.
        bucket_mb: with `zero_stage`, megabytes of gradients that are reduced at a time.
        master_weights: with `zero_stage` and parameters of 16 bits (`precision="bf16-true"` or `"16-true"`), let the
            optimizer update a divided copy of 32 bits, as in the paper.
        offload: with `zero_stage`, keep optimizer states, and that copy, in the host's memory, and update there.
        mesh_order: the axes, outermost first. The last one's ranks are neighbours, so inside a host.
        **kwargs: see `PipelineStrategy`.

    One size may be None: it is then the number of devices over the others.

    Raises:
        ValueError: an argument is not as described.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = HybridStrategy(pipeline_parallel_size=2, tensor_parallel_size=2)
        >>> trainer = Trainer(accelerator="cpu", devices=8, strategy=strategy)  # doctest: +SKIP

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473.
    """

    planes = (("pipeline", "tensor"),)

    def __init__(
        self,
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = 1,
        tensor_parallel_size: int | None = 1,
        zero_stage: int = 0,
        gather: Gather = "step",
        bucket_mb: float = 128.0,
        master_weights: bool = True,
        offload: bool = False,
        mesh_order: Sequence[str] = AXES,
        tensor_plan: Plan = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        partition_activations: bool = False,
        overlap_sums: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(zero_stage, gather, bucket_mb, master_weights, offload, **kwargs)
        refuse_arguments(
            self,
            tensor_plan=(
                tensor_plan,
                tensor_plan == "auto" or is_plan(tensor_plan),
                '"auto" or a mapping of name patterns to styles',
            ),
            sequence_parallel=(sequence_parallel, isinstance(sequence_parallel, bool), "True or False"),
            loss_parallel=(loss_parallel, isinstance(loss_parallel, bool), "True or False"),
            overlap_sums=(
                overlap_sums,
                overlap_sums is False or (overlap_sums is True and not sequence_parallel),
                "False, or True with sequence_parallel=False",
            ),
            partition_activations=(
                partition_activations,
                partition_activations is False
                or (partition_activations is True and self.recompute == "block" and not sequence_parallel),
                'False, or True with recompute="block" and sequence_parallel=False',
            ),
            cuda_graphs=(
                self.cuda_graphs,
                not self.cuda_graphs or tensor_parallel_size == 1,
                "False with tensor_parallel_size above 1: what ranks say to each other inside a block is not captured",
            ),
        )
        self.tensor_plan, self.sequence_parallel, self.loss_parallel = tensor_plan, sequence_parallel, loss_parallel
        self.partition_activations, self.gathered_inputs = partition_activations, Traffic()
        self.overlap_sums = overlap_sums
        sizes = {"data": data_parallel_size, "pipeline": pipeline_parallel_size, "tensor": tensor_parallel_size}
        self.degrees = Degrees(sizes, mesh_order)

    def axes(self) -> Mapping[str, int]:
        return self.degrees.axes(self.world_size)

    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_info(table(self.axes()))

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.axis_size("tensor") > 1:
            count_whole(trainer)

    def _default_microbatches(self) -> int:
        if self.num_ranks == 1 and self.num_microbatches is None and isinstance(self.schedule, str):
            return 1
        return super()._default_microbatches()

    def keep_inputs(self) -> AbstractContextManager[Any]:
        if not self.partition_activations or self.axis_size("tensor") == 1:
            return super().keep_inputs()
        return ShardedInputs(self.group("tensor"), self.gathered_inputs)

    def _assemble(self) -> Pipeline:
        assert self.lightning_module is not None
        if self.axis_size("tensor") > 1:
            self._refuse_overlap(self._full_schedule())
            axis = TensorAxis(
                self.axis_rank("tensor"), self.axis_size("tensor"), partial(self.group, "tensor"), self.blocked
            )
            self.tensor = TensorParallel(
                self.lightning_module,
                axis,
                self.root_device,
                self.tensor_plan,
                self.sequence_parallel,
                self.loss_parallel,
                self.overlap_sums,
            )
        return super()._assemble()

    def _refuse_overlap(self, schedule: Schedule) -> None:
        if self.overlap_sums and any(action.kind == "I" for row in schedule.actions for action in row):
            raise ValueError(
                f"{type(self).__name__}(overlap_sums=True) makes gradients of weights within a backward, and schedule"
                f" {schedule.name!r} makes them later. Use overlap_sums=False, or a schedule that splits no backward."
            )

    def sums_while_running(
        self, schedule: Schedule, is_settled: bool
    ) -> tuple[Round | None, Callable[[int], None] | None]:
        early, after = super().sums_while_running(schedule, is_settled)
        if not self.tensor.summed:
            return early, after
        coming = self._summed_after(schedule)

        def sums_first(action: int) -> None:
            self.tensor.sum_gradients(coming.get(action, ()))
            if after is not None:
                after(action)

        return early, sums_first

    def _summed_after(self, schedule: Schedule) -> dict[int, list[nn.Parameter]]:
        """By action of this rank's row, the parameters whose gradients the tensor axis adds up when it is over."""
        found: dict[int, list[nn.Parameter]] = {}
        for entry, parameter in self.pipeline.own:
            if parameter in self.tensor.summed:
                number = last_action(schedule, self.pipeline.row, entry.stages)
                found.setdefault(number, []).append(parameter)
        return found

    def training_step(self, batch: Any, *args: Any) -> Any:
        output = super().training_step(batch, *args)
        if self.axis_size("tensor") > 1:
            self._compare_losses(output)
        return output

    def _compare_losses(self, output: Any) -> None:
        """At batches 0, 1, 2, 4, 8, ...: what somebody does with a rank's part of the model comes out in its loss.

        Raises:
            ValueError: ranks that see the same rows have different losses.
        """
        assert self.lightning_module is not None
        index = self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx
        if index & (index - 1) == 0:
            loss = output["loss"] if isinstance(output, Mapping) else output
            self.pipeline.check_same("loss", {f"training batch {index}": loss})

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.axis_size("tensor") > 1:
            for optimizer in self.optimizers:
                refuse_optimizer(optimizer, type(self).__name__)
