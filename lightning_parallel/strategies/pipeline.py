"""`PipelineStrategy`: an unmodified LightningModule trains as a pipeline.

The one idea: a Trainer step becomes a run of a schedule. `training_step` cuts the batch into micro-batches, runs this
rank's actions and returns the loss; the gradients it made are kept aside (Lightning zeroes gradients between the
forward and `backward`) and `backward` adds them to `p.grad`. Everything else (hooks, clipping, optimizers, schedulers,
logging) stays where Lightning has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.checkpoint.full import PrunedOptimizer
from lightning_parallel.failure.patience import Patience
from lightning_parallel.mesh import grid
from lightning_parallel.pipeline import microbatch
from lightning_parallel.pipeline.assembly import Pipeline, rows_by_rank
from lightning_parallel.pipeline.batch_norm import DeferredBatchNorm
from lightning_parallel.pipeline.cut import Recompute
from lightning_parallel.pipeline.memoryless import without_memory
from lightning_parallel.pipeline.partition import PARTITIONS, Partition
from lightning_parallel.pipeline.phantom import PhantomError, shapes_only
from lightning_parallel.pipeline.random_streams import share_generators
from lightning_parallel.pipeline.replica_check import buffers_unchanged
from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.stats import PipelineStats
from lightning_parallel.pipeline.work import Marks
from lightning_parallel.strategies.arguments import all_are, is_count, is_positive, read_schedule, refuse_arguments
from lightning_parallel.strategies.base import StartMethod
from lightning_parallel.strategies.pipeline_gradients import PipelineGradients
from lightning_parallel.trainer.directions import Directions
from lightning_parallel.trainer.holders import cut_copies, refuse_sharded
from lightning_parallel.trainer.log_spreader import LogSpreader, StepIsVoid
from lightning_parallel.trainer.loss_scale import LossScale
from lightning_parallel.trainer.metrics import StepMetrics
from lightning_parallel.trainer.refusals import refuse_optimizers, refuse_unsupported
from lightning_parallel.trainer.repeats import Repeats
from lightning_parallel.trainer.step import TrainerStep

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_PARTITION_WORDS = '"parameters", "flops", "time", "count" or a list with the number of blocks of each stage'
LossWeight = Callable[[Any], "float | Tensor"]


class PipelineStrategy(PipelineGradients):
    """Cuts the model into stages, one a rank, and runs every batch as micro-batches by a schedule.

    The LightningModule is used as it is. Global rank 0 holds the last stage: loss, logging and progress bar are real
    there, and what a step logs is logged on every rank. Equal to one process that runs the same micro-batches and
    averages them.

    Args:
        schedule: a name ("1f1b", "interleaved_1f1b:v=3", "zb_v"; see docs/schedules.md), the path of a CSV file of
            actions, or a `Schedule`. Some hold several stages a rank, and cut the model into as many; some ("chimera",
            "dualpipe", "gems") hold each stage on several ranks, whose gradients are summed. "auto" times the model's
            units on one rank before the first step (they need the module's `example_input_array`, a micro-batch) and
            takes the schedule whose step should be shortest; rank 0 prints the reason.
        num_microbatches: M; default 4 a stage (GPipe's rule for a small bubble). Batches of fewer rows use fewer.
        blocks: where the model may be cut: "auto" (the longest chain of submodules), a container's name, or block
            names.
        partition: how blocks are dealt to stages: balanced by "parameters", "flops" or measured "time" (both of these
            need the module's `example_input_array`, a micro-batch), by "count", or a list of counts.
        stages: {module name: stage} for modules outside the blocks that the order of registration places wrongly.
        loss_weight: weight of a micro-batch in the loss and in logged means; default its rows.
        memory_limit: bytes of activations that a rank may hold, for schedule="auto".
        check_loss: compare the first batch's loss, whole against micro-batches, and raise if they differ; warn of
            logged numbers that do, and raise if a micro-batch reads tensors that another left in attributes.
        dynamic_shapes: agree on every transfer anew, for models whose shapes do not follow from the batch's. A step may
            then call the model once.
        skip_connections: let a stage use what any earlier stage's block returned (U-Nets, encoder-decoders, losses on
            features of the middle): sent straight to the stages that use it. Which these are is found on one
            micro-batch of every signature, which goes through all stages once more than it is trained on.
        receive_ahead: how many coming actions have their receives posted early; default 1 on CPU, 0 on GPUs.
        recompute: what the backward computes again instead of keeping it: "none", what lies inside a "block", or the
            whole "stage" but for what came in, as GPipe does (on the last stage, which makes the loss, the blocks).
        cuda_graphs: launch every block as CUDA graphs from the second step on, for micro-batches so small that the host
            takes longer to launch a block than the GPU to compute it. Shapes must follow from the batch's, and what is
            Python in a block happens once, at capture. Blocks with hooks run as they are.
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
        dynamic_shapes: bool = False,
        skip_connections: bool = False,
        receive_ahead: int | None = None,
        recompute: Recompute = "none",
        cuda_graphs: bool = False,
        data_parallel_size: int = 1,
        state_dict_type: Literal["full", "sharded"] = "full",
        start_method: StartMethod = "popen",
        timeout: timedelta = timedelta(minutes=30),
        patience: Patience | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(state_dict_type, start_method=start_method, timeout=timeout, patience=patience, **kwargs)
        refuse_arguments(
            self,
            schedule=(schedule, isinstance(schedule, (str, Path, Schedule)), "a name, a path or a Schedule"),
            num_microbatches=(
                num_microbatches,
                num_microbatches is None or is_count(num_microbatches, 1),
                "at least 1",
            ),
            blocks=(blocks, isinstance(blocks, str) or all_are(blocks, str), '"auto", a name or names'),
            partition=(partition, partition in PARTITIONS or all_are(partition, int), _PARTITION_WORDS),
            stages=(
                stages,
                stages is None or (isinstance(stages, Mapping) and all(isinstance(n, int) for n in stages.values())),
                "a mapping of names to numbers of stages",
            ),
            loss_weight=(loss_weight, loss_weight is None or callable(loss_weight), "a function of a micro-batch"),
            memory_limit=(
                memory_limit,
                memory_limit is None or (is_positive(memory_limit) and schedule == "auto"),
                'a number of bytes above 0, with schedule="auto"',
            ),
            check_loss=(check_loss, isinstance(check_loss, bool), "True or False"),
            dynamic_shapes=(dynamic_shapes, isinstance(dynamic_shapes, bool), "True or False"),
            skip_connections=(
                skip_connections,
                isinstance(skip_connections, bool) and not (skip_connections and dynamic_shapes),
                "True or False, and False with dynamic_shapes=True",
            ),
            receive_ahead=(
                receive_ahead,
                receive_ahead is None or is_count(receive_ahead, 0),
                "a number of actions, 0 or more",
            ),
            recompute=(recompute, recompute in get_args(Recompute), '"none", "block" or "stage"'),
            cuda_graphs=(
                cuda_graphs,
                isinstance(cuda_graphs, bool) and not (cuda_graphs and (dynamic_shapes or recompute != "none")),
                'True or False, and False with dynamic_shapes=True or recompute="block" or "stage"',
            ),
            data_parallel_size=(data_parallel_size, is_count(data_parallel_size, 1), "a number of copies, 1 or more"),
        )
        self.data_parallel_size = data_parallel_size
        self.schedule = read_schedule(schedule, num_microbatches)
        self.num_microbatches, self.blocks, self.partition, self.stages = num_microbatches, blocks, partition, stages
        self.loss_weight, self.check_loss, self.dynamic_shapes = loss_weight, check_loss, dynamic_shapes
        self.skip_connections, self.memory_limit = skip_connections, memory_limit
        self.receive_ahead, self.recompute, self.cuda_graphs = receive_ahead, recompute, cuda_graphs
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._loss_checked = False
        self._metrics: StepMetrics | None = None
        self._loss_scale: LossScale | None = None
        self.stats: PipelineStats | None = None

    def axes(self) -> Mapping[str, int]:
        if self.data_parallel_size == 1:
            return {"pipeline": self.world_size}
        return {"data": self.data_parallel_size, "pipeline": max(1, self.world_size // self.data_parallel_size)}

    @property
    def metrics(self) -> StepMetrics:
        assert self._metrics is not None, "the metrics are watched after setup"
        return self._metrics

    @property
    def loss_scale(self) -> LossScale:
        assert self._loss_scale is not None, "there is one after setup"
        return self._loss_scale

    # -- set-up and teardown -------------------------------------------------------------------------------------------

    @contextmanager
    def model_sharded_context(self) -> Any:
        """`configure_model` builds parameters without memory; `setup` gives a rank its own."""
        with without_memory() if self.num_ranks > 1 else nullcontext():
            yield

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.let_host_run_ahead(trainer)
        refuse_unsupported(trainer, self)
        if self.schedule == "auto":
            self._choose_schedule()
        self._refuse_schedule(self._full_schedule())
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        assert self.watch is not None
        self.watch.stage = self.stage
        with self.watch.opening():
            self._pipeline = self._assemble()
        if self.state_dict_type == "sharded":
            refuse_sharded(trainer, self.lightning_module, type(self).__name__)
        cut_copies(trainer, self.lightning_module, self.pipeline.table, self.tensor, self._whole)
        pipeline = self.pipeline
        shares = pipeline.cut.layout.shares
        self.stats = PipelineStats(
            self._full_schedule(), pipeline.first_ranks, pipeline.clock, pipeline.all_gather_of_first, shares,
            pipeline.row,
        )  # fmt: skip
        add_up = pipeline.add_up_over_holders if pipeline.num_replicas > 1 else None
        self._batch_norm = DeferredBatchNorm(self.lightning_module, self.pipeline.cut, add_up)
        self.directions = Directions(pipeline)
        self._metrics = StepMetrics(self.lightning_module, self.pipeline)
        self.repeats = Repeats(self.lightning_module, pipeline, self.metrics, possible=not self.dynamic_shapes)
        self._loss_scale = LossScale(self.precision_plugin, self._sum_over_parts, self.root_device)
        self.spreader = LogSpreader(self.pipeline, self.metrics.hear)
        self._loss_checked = False
        share_generators(self.broadcast)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._states_to_device()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        if self.lightning_module.example_input_array is not None:
            self.precision_plugin.forward_context = self._forward_context  # type: ignore[method-assign]

    def keep_inputs(self) -> AbstractContextManager[Any]:
        """A context in which inputs of blocks are saved that `recompute="block"` computes again."""
        return nullcontext()

    def divides_early(self) -> Callable[[Pipeline, Sequence[nn.Parameter]], None] | None:
        """What divides parameters over the copies as soon as they are made, if anything does."""
        return None

    def _assemble(self) -> Pipeline:
        assert self.lightning_module is not None
        schedule = self._full_schedule()
        order = rows_by_rank(schedule)
        lines = grid(self.axes(), ("data", "tensor", "pipeline")).reshape(-1, self.num_ranks)
        ranks = lines[:, [order.index(row) for row in range(len(order))]]
        return Pipeline(
            self.lightning_module,
            ranks.tolist(),
            self.root_device,
            schedule.placement,
            group=partial(self.group, "pipeline"),
            data_group=self.group("data"),
            tensor_size=self.axis_size("tensor"),
            tensor_group=self.group("tensor"),
            tensor=self.tensor,
            mates_group=partial(self.group, "pipeline", "tensor"),
            blocks=self.blocks,
            partition=self.partition,
            stages=self.stages,
            dynamic_shapes=self.dynamic_shapes,
            skip_connections=self.skip_connections,
            receive_ahead=self.receive_ahead,
            recompute=self.recompute,
            keep_inputs=self.keep_inputs,
            cuda_graphs=self.cuda_graphs,
            early_sums=self.early_sums,
            divide=self.divides_early(),
            context=self.precision_plugin.train_step_context,
            fail=self._stage_error,
            waiting=self.blocked,
        )

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
        if self._loss_scale is not None:
            self._loss_scale.release()
        if self._metrics is not None:
            self.metrics.release(failed)
            self._metrics = None
        if self._pipeline is not None and not failed:
            self.tensor.make_whole()
        super().teardown()
        if self._pipeline is not None:
            self.pipeline.close()
            self.tensor.release()
            if not failed:  # after a failure the device may never answer
                _optimizers_to_device(self.optimizers, torch.device("cpu"))
                self.pipeline.to_device(torch.device("cpu"))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, *args: Any) -> Any:
        return self.repeats.run("training", lambda: self._train(batch, args))

    def _train(self, batch: Any, args: tuple[Any, ...]) -> Any:
        sizes = self._sizes(batch)
        keep = not self._will_be_zeroed()
        with self.pipeline.gradients.aside(keep), self._batch_norm.step(len(sizes)), self._replicas_compared():
            output = self._run("training", batch, args, sizes)
        self._loss_checked = True
        return output

    def _replicas_compared(self) -> AbstractContextManager[None]:
        """At batches 0, 1, 2, 4, 8, ...: are replicas still equal, and does a step leave buffers to its end?"""
        module, pipeline = self.lightning_module, self.pipeline
        assert module is not None
        index = module.trainer.fit_loop.epoch_loop.batch_idx
        if pipeline.num_replicas == 1 or index & (index - 1):
            return nullcontext()
        self._compare_replicas(f"before training batch {index} of epoch {module.trainer.current_epoch}")
        return buffers_unchanged(module)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over the gradients that the schedule made; hooks run where Lightning runs them."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._deliver()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("validation", batch, args)

    def test_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("test", batch, args)

    def predict_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("predict", batch, args)

    def _evaluate(self, kind: str, batch: Any, args: tuple[Any, ...]) -> Any:
        return self.repeats.run(kind, lambda: self._run(kind, batch, args, self._sizes(batch)))

    def _run(self, kind: str, batch: Any, args: tuple[Any, ...], sizes: list[int]) -> Any:
        step = TrainerStep(self, kind, batch, args, sizes)
        if step.index & (step.index - 1) == 0:  # 0, 1, 2, 4, 8, ...
            self.pipeline.check_same("batch", {f"{kind} batch {step.index}": batch})
        if step.index == 0:
            self._pause()
        if step.index == 0 and kind != "training":
            self.pipeline.data.equalize(self.pipeline.own_buffers())  # running statistics are the first copy's
            self.pipeline.check_same("logged", self._logged())
        try:
            return step.run()
        except StepIsVoid:
            self._drop_what_was_measured(kind)
            raise

    def _drop_what_was_measured(self, kind: str) -> None:
        """A step is void, and will begin anew."""
        if kind == "training" and self.stats is not None:
            self.stats.cancel()
        if kind == "training" and self.pipeline.sums is not None:
            self.pipeline.sums.cancel()

    def _logged(self) -> dict[str, float]:
        assert self.lightning_module is not None
        return {name: float(value) for name, value in self.lightning_module.trainer.callback_metrics.items()}

    def _check_last_logged(self) -> None:
        """Compare what was logged where no step follows that would; rank 0 tells, and does not wait."""
        if self.num_ranks > 1 and self.at_loss:
            self.pipeline.tell(self._logged())
            self.pipeline.settle()
        elif self.num_ranks > 1:
            self.pipeline.check_heard("logged", self._logged(), self.metrics.hear())

    def on_train_end(self) -> None:
        self._check_last_logged()
        self._pause()
        if self.pipeline.num_replicas > 1:
            self._compare_replicas("at the end of training")

    def _compare_replicas(self, when: str) -> None:
        self.pipeline.compare_replicas(when)

    on_validation_end = on_test_end = _check_last_logged

    def _sizes(self, batch: Any) -> list[int]:
        return microbatch.row_sizes(microbatch.count_rows(batch), self._default_microbatches())

    def wants_loss_check(self, step: TrainerStep) -> bool:
        """Whether this step's loss and logged numbers are compared with those of the whole batch: the first training
        step's."""
        return self.check_loss and step.training and not self._loss_checked and len(step.sizes) > 1

    def marks(self, schedule: Schedule, training: bool) -> Marks:
        """Where the engine leaves the marks of a step; those of training steps are kept for the callbacks."""
        assert self.stats is not None
        return self.stats.begin(schedule) if training else Marks(schedule)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """The precision's context; outside steps it is entered by the model's summary, which wants shapes alone."""
        outside = self._metrics is None or not self.metrics.in_step
        with type(self.precision_plugin).forward_context(self.precision_plugin):
            if not outside:
                yield
                return
            try:
                with shapes_only():
                    yield
            except PhantomError as error:
                raise PhantomError(
                    "The model's summary runs example_input_array through the model, of which a rank holds one stage,"
                    f" on shapes alone, and the model reads data on its way: {error} Leave example_input_array out, or"
                    " use Trainer(enable_model_summary=False)."
                ) from error

    # -- failures ------------------------------------------------------------------------------------------------------

    def _stage_error(self, error: Exception, action: Action) -> Exception:
        assert self.watch is not None
        work = "forward" if action.kind == "F" else "backward"
        if len(self.stages_held) > 1:
            self.watch.stage = action.stage
        replica = f" on replica {action.replica}" if self.pipeline.num_replicas > 1 else ""
        return self.watch.report(error, f"the {work} of micro-batch {action.microbatch}{replica}")
