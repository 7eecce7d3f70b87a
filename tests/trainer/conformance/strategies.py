"""The strategies that the suite runs over: adding one is adding an entry here.

A strategy that refuses something by design names it in ``refuses``, with the words a user gets; then these words are
what is asserted, in place of parity.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_parallel  # noqa: F401  (registers the strings)
from tests.trainer.conformance.cut import told


@dataclass(frozen=True)
class Entry:
    """A strategy under test.

    Args:
        name: its string in Lightning's registry.
        ranks: how many processes run it.
        options: what it is built with, beside what the string says.
        trainer: what a Trainer is given too. Ranks that would see different rows are all given all rows, so that the
            mean of their gradients is one process's; different rows are tested elsewhere.
        advice: a warning of Lightning's that does not count.
        whole_batches: options with which a step sees its batch whole, as BatchNorm needs to equal one process.
        refuses: what it refuses by design (names in ``test_refused.REFUSED``), and a part of what it says.
        core: whether it runs only the scenarios that are marked so, since a sibling runs all of them.
        without: scenarios that make no sense for it.
        slow: whether `make test` leaves it out.
        cut: whether its tensor axis is told what to divide; see `cut`.
        label: what tells it from a sibling with the same string and as many ranks.
    """

    name: str
    ranks: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    whole_batches: Mapping[str, Any] = field(default_factory=dict)
    advice: str = "no such warning"
    refuses: Mapping[str, str] = field(default_factory=dict)
    core: bool = False
    without: Collection[str] = ()
    slow: bool = False
    cut: bool = False
    label: str = ""

    def make(self, whole_batches: bool = False) -> Strategy:
        """A new strategy object."""
        registered = StrategyRegistry[self.name]
        options = {**registered["init_params"], **self.options, **(self.whole_batches if whole_batches else {})}
        strategy = registered["strategy"](**options)
        return told(strategy) if self.cut else strategy

    def case(self, *values: Any, id: str = "") -> Any:
        """A set of a test's parameters, with the marks of `slow` and the entry's name in front of its id."""
        marks = [pytest.mark.slow, pytest.mark.timeout(self.timeout + 5)] if self.slow else []
        return pytest.param(self, *values, id=f"{self}-{id}" if id else str(self), marks=marks)

    @property
    def timeout(self) -> float:
        """Seconds that a launch may take."""
        return 115.0 if self.slow else 55.0

    def __str__(self) -> str:
        return f"{self.name} on {self.ranks}{self.label}"


PIPELINE: dict[str, Any] = {
    "options": {"num_microbatches": 4},
    "whole_batches": {"num_microbatches": 1},
    "refuses": {
        "manual_optimization": (
            "PipelineStrategy runs a step's backwards inside its schedule and cannot run manual optimization. With"
            " several optimizers (a GAN) use ZeROStrategy(stage=2), which runs the step as it is; with one, set"
            " self.automatic_optimization = True and move what follows the loss into hooks."
        ),
        "overridden_backward": (
            "OwnBackward overrides backward, which PipelineStrategy never calls: the backwards run inside the schedule."
            " Remove the override; on_before_backward and on_after_backward are called as ever."
        ),
        "optimizer_that_runs_its_closure_again": (
            "PipelineStrategy got an LBFGS, whose step takes products over all parameters and decides by the loss how"
            " often to run the step; each rank holds the parameters of its own stage. Use an optimizer that treats each"
            " parameter by itself (SGD, Adam, ...)."
        ),
        "step_on_an_iterator": (
            "PipelineStrategy hands every rank the batch and cuts it into micro-batches: it cannot run"
            " training_step(dataloader_iter). Write training_step(self, batch, batch_idx)."
        ),
        "step_that_returns_none": (
            "The step ended on stage 0 without calling `net.7`, the first block of stage 1. A step must call every"
            " block, in order; use fewer stages or other blocks=. To skip a batch, return 0 * its loss in place of"
            " None."
        ),
        "norms_of_all_gradients": (
            "which this stage does not hold: `float` reads its data. Clip with self.clip_gradients(...) or"
            " Trainer(gradient_clip_val=...), which count"
            " every stage; take norms over parameters whose grad this rank holds."
        ),
        "clipping_without_lightning": (
            "which this stage does not hold: `linalg_vector_norm` uses it outside its module. Clip with"
            " self.clip_gradients(...) or"
        ),
        "penalty_over_all_parameters": (
            "The step uses parameter `net.0.weight` of stage 0, which this stage does not hold: `square` uses it"
            " outside its module. Compute such a term from a module's own forward, tie the parameter to a module of"
            " this stage, or use the optimizer's weight_decay."
        ),
        "batch_size_finder": (
            "PipelineStrategy cannot run the batch size finder (Tuner.scale_batch_size, BatchSizeFinder): it tries"
            " sizes until a process runs out of memory, and each process saves and restores alone. Set the batch size,"
            " and num_microbatches so that a micro-batch fits."
        ),
        "graph_of_the_model": (
            "A logger with log_graph=True traces the whole model, of which a process holds one stage under"
            " PipelineStrategy. Leave log_graph out, and log the graph in one process."
        ),
        "summary_of_a_model_that_reads_data": (
            "The model's summary runs example_input_array through the model, of which a rank holds one stage, on shapes"
            " alone, and the model reads data on its way: "
        ),
    },
}
# Norms see the whole batch while it is cut, so that BatchNorm is one process's with micro-batches too.
WHOLE_NORMS: dict[str, Any] = {
    **PIPELINE,
    "options": {"num_microbatches": 4, "batch_norm": "batch"},
    "whole_batches": {},
    # Sums over rows come in another order, and BatchNorm makes that too large for 32 bits: in 64 it is tried. Buffers
    # that a forward writes itself are written by every micro-batch.
    "without": ["batch_norm", "buffers"],
    "label": ' with batch_norm="batch"',
}
# With two ranks and two directions every rank holds all parameters: what needs them all is one process's.
_HELD = {
    "norms_of_all_gradients",
    "clipping_without_lightning",
    "penalty_over_all_parameters",
    "summary_of_a_model_that_reads_data",
}
BOTH_WAYS = {**PIPELINE, "refuses": {name: text for name, text in PIPELINE["refuses"].items() if name not in _HELD}}
ZERO: dict[str, Any] = {
    "options": {"bucket_mb": 1e-4, "master_weights": False},
    "trainer": {"use_distributed_sampler": False},
    "advice": r"It is recommended to use `self\.log\(.*sync_dist=True\)`",
    "refuses": {
        "optimizer_that_runs_its_closure_again": (
            "ZeROStrategy got LBFGS, but its step takes products over all parameters and decides by the loss how often"
            " to run the step; each rank holds pieces of parameters. Use an optimizer that treats each element by"
            " itself (SGD, Adam, AdamW, RMSprop, ...)."
        ),
        # Lightning's own words, under any strategy (the first) or any of several ranks.
        "step_on_an_iterator": "With `def training_step(self, dataloader_iter)`, `self.log(..., batch_size=...)`",
        "step_that_returns_none": "Skipping the `training_step` by returning None in distributed training is not",
        "batch_size_finder": "The Batch size finder is not supported with distributed strategies.",
    },
}
ZERO_3: dict[str, Any] = {
    **ZERO,
    "refuses": {
        **ZERO["refuses"],
        "graph_of_the_model": (
            'A logger with log_graph=True traces the whole model, of which ZeROStrategy(engine="fsdp2") leaves each'
            " process a part. Leave log_graph out, and log the graph in one process."
        ),
        # PyTorch's own words for a sharded tensor that meets a whole one.
        "penalty_over_all_parameters": "got mixed torch.Tensor and DTensor, need to convert all",
    },
}
# DeepSpeed holds gradients for itself, for one optimizer with all its groups, and drops them with every step.
DEEPSPEED: dict[str, Any] = {
    **ZERO,
    "options": {"engine": "deepspeed", "bucket_mb": 1e-4, "master_weights": False},
    "refuses": {
        **ZERO["refuses"],
        "norms_of_all_gradients": "reads a gradient that DeepSpeed holds for itself.",
        "clipping_without_lightning": "reads a gradient that DeepSpeed holds for itself.",
    },
    # 64 bits, gradients that hooks read, change or keep over steps, groups that are added, and layers that are frozen
    # as training goes: test_zero_deepspeed.py.
    "without": [
        "double_precision", "clipped_by_value", "clipping_of_ones_own", "gradients_changed_in_hooks",
        "zero_grad_of_ones_own", "finetuning", "backbone_finetuning", "frozen_layers",
        "batch_norm_in_double_precision",
    ],
    "label": " by DeepSpeed",
}  # fmt: skip
DEEPSPEED_3: dict[str, Any] = {**DEEPSPEED, "without": [*DEEPSPEED["without"], "ema", "summary_with_an_example_input"]}
# Two stages on each of two ranks.
IN_FOUR: dict[str, Any] = {
    **PIPELINE,
    "refuses": {
        **PIPELINE["refuses"],
        "step_that_returns_none": "The step ended on stage 0 without calling `net.",
        "penalty_over_all_parameters": (
            "outside its module. Compute such a term from a module's own forward, tie the parameter to a module of"
        ),
    },
}
# Both copies get all rows, so that their mean is one process. (How rows are dealt: tests/trainer/test_data_axis.py.)
COPIES: dict[str, Any] = {
    **PIPELINE,
    "options": {"num_microbatches": 4, "data_parallel_size": 2},
    "trainer": {"use_distributed_sampler": False},
    "without": ["outside_steps"],  # counts the rows of all copies
    "label": " in 2 copies",
}
# Every copy gets all rows, and the states of each stage are divided between two copies.
MESH: dict[str, Any] = {
    **PIPELINE,
    "options": {
        **PIPELINE["options"],
        "pipeline_parallel_size": 2,
        "zero_stage": 2,
        "bucket_mb": 1e-4,
        "master_weights": False,
    },
    "trainer": {"use_distributed_sampler": False},
    "refuses": {
        **{name: text.replace("PipelineStrategy", "HybridStrategy") for name, text in PIPELINE["refuses"].items()},
        "batch_size_finder": "The Batch size finder is not supported with distributed strategies.",  # Lightning's words
    },
    "without": ["outside_steps"],  # counts the rows of all copies
    "label": ", 2 x 2 with ZeRO 2",
}
MESH_3: dict[str, Any] = {
    **MESH,
    "options": {**MESH["options"], "zero_stage": 3},
    "label": ", 2 x 2 with ZeRO 3",
}
# Linear layers are cut by columns and rows, one after the other. A hook that reads gradients or weights for itself has
# those of a rank's part, which comes out in what it logs or in the loss.
_OF_A_PART = "(rank 1 unlike rank 0). Each holds a part of what tensor_plan cuts, and of its gradient: a step or a hook"
TENSOR: dict[str, Any] = {
    "refuses": {
        **{
            name: PIPELINE["refuses"][name].replace("PipelineStrategy", "TensorParallelStrategy")
            for name in (
                "manual_optimization", "overridden_backward", "optimizer_that_runs_its_closure_again",
                "step_on_an_iterator", "batch_size_finder", "graph_of_the_model",
            )
        },
        "step_that_returns_none": "training_step returned NoneType as its loss for a micro-batch",
        "norms_of_all_gradients": "(rank 1 unlike rank 0), so schedulers and callbacks that watch it would part.",
        **dict.fromkeys(("clipping_without_lightning", "penalty_over_all_parameters"), _OF_A_PART),
    },
    # Sums over features come in another order, and BatchNorm makes that too large for 32 bits: in 64 it is tried. A
    # summary counts what rank 0 holds.
    "without": [
        "batch_norm", "summary_of_the_whole_model", "summary_with_an_example_input",
        "rich_summary_with_an_example_input_in_bf16",
    ],
    "cut": True,
}  # fmt: skip
PIPELINE_OF_TENSOR: dict[str, Any] = {
    **PIPELINE,
    "options": {**PIPELINE["options"], "pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "without": TENSOR["without"],
    "cut": True,
    "label": ", pipeline 2 x tensor 2",
}
# Both workers get all rows, and the mean of a clock's pushes is one process's gradient.
SERVERS: dict[str, Any] = {
    "options": {"lease": 30.0},
    "trainer": {"use_distributed_sampler": False},
    "advice": r"It is recommended to use `self\.log\(.*sync_dist=True\)`",
    "refuses": {
        "optimizer_that_runs_its_closure_again": (
            "The servers know SGD, Adagrad, Adam, AdamW, and this is LBFGS, whose steps are of all workers together."
            ' Have the servers make those, with ParameterServerStrategy(consistency="sandblaster").'
        ),
        # Lightning's own words, under any of several ranks.
        "step_on_an_iterator": "With `def training_step(self, dataloader_iter)`, `self.log(..., batch_size=...)`",
        "step_that_returns_none": "Skipping the `training_step` by returning None in distributed training is not",
        "batch_size_finder": "Tuning the batch size is currently not supported with distributed strategies.",
    },
    # A momentum that is scheduled, 64 bits, parameters that are added or frozen in the run: refused, see
    # test_parameter_server.py. With 16-bit weights the servers have 32-bit copies, which one process has not.
    "without": [
        "schedules_and_their_monitor",
        "double_precision",
        "batch_norm_in_double_precision",
        "finetuning",
        "backbone_finetuning",
        "frozen_layers",
        "true_bf16",
    ],
}
# One worker waits for nobody: nothing is stale, and Lightning itself refuses less.
_SEVERAL = {"step_that_returns_none", "batch_size_finder"}
ONE_WORKER = {**SERVERS, "refuses": {n: text for n, text in SERVERS["refuses"].items() if n not in _SEVERAL}}
STRATEGIES = (
    Entry("pipeline_1f1b", 2, **PIPELINE),
    # What follows is slow; `make test` trains with each in tests of its own (test_two_ways.py, test_zero.py, ...).
    Entry("pipeline_gpipe", 4, **PIPELINE, core=True, slow=True),
    Entry("pipeline_gpipe", 2, **WHOLE_NORMS, slow=True),
    Entry("pipeline_naive", 2, **PIPELINE, core=True, slow=True),
    Entry("zero_1", 2, **ZERO, core=True, slow=True),
    Entry("zero_2", 2, **ZERO, slow=True, label=", all scenarios"),
    Entry("zero_3", 2, **ZERO_3, core=True, slow=True),
    Entry("zero_2", 2, **DEEPSPEED, slow=True),
    Entry("zero_3", 2, **DEEPSPEED_3, core=True, slow=True),
    Entry("pipeline_interleaved_1f1b", 2, **IN_FOUR, slow=True, label=", all scenarios"),
    Entry("pipeline_zb_v", 2, **IN_FOUR, slow=True, label=", all scenarios"),
    Entry("pipeline_1f1b", 4, **COPIES, core=True, slow=True),
    Entry("hybrid", 4, **MESH, slow=True),
    Entry("hybrid", 4, **MESH_3, core=True, slow=True),
    Entry("tensor", 2, **TENSOR, slow=True, label=", all scenarios"),
    Entry("hybrid", 4, **PIPELINE_OF_TENSOR, core=True, slow=True),
    Entry("parameter_server", 2, **SERVERS, core=True, slow=True),
    Entry("parameter_server", 2, **SERVERS, slow=True, label=", all scenarios"),
    Entry("ssp", 1, **ONE_WORKER, slow=True, label=", all scenarios"),
    Entry("pipeline_chimera", 2, **BOTH_WAYS, slow=True, label=", all scenarios"),
    Entry("pipeline_gems", 2, **BOTH_WAYS, core=True, slow=True),
    Entry("pipeline_dualpipe", 2, **BOTH_WAYS, core=True, slow=True),
    *(
        Entry(f"pipeline_{name}", 2, **PIPELINE, core=True, slow=True)
        for name in (
            "dapple", "looped_bfs", "zb_h1", "zb_h2", "zb_1p", "zb_2p", "zb_auto", "interleaved_zb", "v_half", "v_min",
            "zb_v_auto", "dualpipe_v",
        )
    ),
)  # fmt: skip
