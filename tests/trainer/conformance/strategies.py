"""The strategies that the suite runs over: adding one is adding an entry here.

A strategy that refuses something by design names it in ``refuses``, with the words a user gets; then these words are
what is asserted, in place of parity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_parallel  # noqa: F401  (registers the strings)


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
    """

    name: str
    ranks: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    whole_batches: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    advice: str = "no such warning"
    refuses: Mapping[str, str] = field(default_factory=dict)
    core: bool = False

    def make(self, whole_batches: bool = False) -> Strategy:
        """A new strategy object."""
        registered = StrategyRegistry[self.name]
        options = {**registered["init_params"], **self.options, **(self.whole_batches if whole_batches else {})}
        return registered["strategy"](**options)

    def __str__(self) -> str:
        return f"{self.name} on {self.ranks}"


PIPELINE: dict[str, Any] = {
    "options": {"num_microbatches": 4},
    "whole_batches": {"num_microbatches": 1},
    "refuses": {
        "manual_optimization": (
            "PipelineStrategy runs a step's backwards inside its schedule and cannot run manual optimization. Set"
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
            "PipelineStrategy cuts batches into micro-batches and cannot run training_step(dataloader_iter). Take the"
            " batch."
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
        "model_called_twice": (
            "Module `net.0` (stage 0) is called a second time in one step, and stage 0 has ended by then. Join the"
            " inputs and call it once, call it before the first block of the next stage, or train with one stage."
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
        # PyTorch's own words for a sharded tensor that meets a whole one, or is read.
        "norms_of_all_gradients": "but its data is not allocated yet",
        "penalty_over_all_parameters": "got mixed torch.Tensor and DTensor, need to convert all",
    },
}
STRATEGIES = (
    Entry("pipeline_1f1b", 2, **PIPELINE),
    Entry("pipeline_gpipe", 4, **PIPELINE, core=True),
    Entry("pipeline_naive", 2, **PIPELINE, core=True),
    Entry("zero_1", 2, **ZERO, core=True),
    Entry("zero_2", 2, **ZERO),
    Entry("zero_3", 2, **ZERO_3, core=True),
)
