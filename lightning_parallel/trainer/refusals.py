"""What a pipeline does not do, said at set-up: what is, what was needed, what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_parallel.pipeline.phantoms.stand_in import StandIn
from lightning_parallel.zero.optimizer.elementwise import refuse_coupling

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy


_EVALUATIONS = {
    TrainerFn.FITTING: "validation_step", TrainerFn.VALIDATING: "validation_step", TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}  # fmt: skip


def refuse_unsupported(trainer: Trainer, strategy: Strategy) -> None:
    """Raise for what a pipeline cannot run as the module is written.

    Raises:
        ValueError: manual optimization, an overridden backward, or an iterator step.
        TypeError: the module is not a `lightning.pytorch.LightningModule`.
    """
    module, name = strategy.lightning_module, type(strategy).__name__
    if not isinstance(module, LightningModule):
        raise TypeError(f"{name} got a {type(module)}, it needs a lightning.pytorch.LightningModule.")
    refuse_no_memory(module, name, parameters_too=False)
    _refuse_batch_size_finder(trainer, name)
    if cast(Any, strategy).num_ranks > 1 or cast(Any, strategy)._default_microbatches() > 1:
        refuse_scripts(module, f"{name} intercepts calls of modules to run them stage by stage")
    if trainer.state.fn in _EVALUATIONS:
        _refuse_iterators(module, name, _EVALUATIONS[trainer.state.fn])
    if trainer.state.fn != TrainerFn.FITTING:
        return
    pipeline = cast(Any, strategy)
    if pipeline.batch_norm == "microbatch" and pipeline._default_microbatches() > 1:
        remedies = 'batch_norm="batch" and schedule="gpipe", num_microbatches=1, or norms of single rows'
        refuse_synchronised_norms(strategy, "normalises within a micro-batch", remedies)
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} runs a step's backwards inside its schedule and cannot run manual optimization. With several"
            " optimizers (a GAN) use ZeROStrategy(stage=2), which runs the step as it is; with one, set"
            " self.automatic_optimization = True and move what follows the loss into hooks."
        )
    hooked = [name for name, p in module.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked and pipeline._default_microbatches() > 1:
        raise ValueError(
            f"`{hooked[0]}` has a hook of register_post_accumulate_grad_hook, which would be called for every"
            f" micro-batch, on what is no sum yet. Under {name} change gradients in on_before_optimizer_step, or use"
            " num_microbatches=1."
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__} overrides backward, which {name} never calls: the backwards run inside the"
            " schedule. Remove the override; on_before_backward and on_after_backward are called as ever."
        )
    if module.example_input_array is not None and any(
        getattr(logger, "_log_graph", False) for logger in trainer.loggers
    ):
        raise ValueError(
            "A logger with log_graph=True traces the whole model, of which a process holds one stage under"
            f" {name}. Leave log_graph out, and log the graph in one process."
        )
    _refuse_iterators(module, name, "training_step")


def refuse_optimizers(strategy: Strategy) -> None:
    """Raise for optimizers that run the step again by themselves; called when `configure_optimizers` has been.

    Raises:
        ValueError: an optimizer's step needs the closure for more than one evaluation, or couples parameters.
    """
    for optimizer in strategy.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"{type(strategy).__name__} got an LBFGS, whose step takes products over all parameters and decides by"
                " the loss how often to run the step; each rank holds the parameters of its own stage. Use an optimizer"
                " that treats each parameter by itself (SGD, Adam, ...)."
            )
        if cast(Any, strategy).num_ranks > 1:
            refuse_coupling(optimizer, type(strategy).__name__)


def refuse_synchronised_norms(strategy: Strategy, what: str, instead: str) -> None:
    """Raise for `Trainer(sync_batchnorm=True)` and a module with batch norms.

    Raises:
        ValueError: it would have no effect.
    """
    module = strategy.lightning_module
    assert module is not None
    norms = [name for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms and getattr(strategy, "_layer_sync", None) is not None:
        raise ValueError(
            f"Trainer(sync_batchnorm=True) has no effect with {type(strategy).__name__}, whose batch norm `{norms[0]}`"
            f" {what}. Leave it out, and where a norm has to see more rows use {instead} (GroupNorm, LayerNorm)."
        )


def refuse_scripts(module: nn.Module, what: str) -> None:
    """Raise for modules of `torch.jit.script`, whose calls and parameters Python does not see.

    Args:
        module: which may hold some.
        what: is done with modules that are not.

    Raises:
        ValueError: there is one.
    """
    scripted = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise ValueError(
            f"`{scripted[0]}` is a module of torch.jit.script, and {what}, which scripts do not allow. Use the module"
            " as it is, without torch.jit.script, or ZeROStrategy(stage=2), which runs scripts."
        )


def refuse_no_memory(module: nn.Module, name: str, parameters_too: bool) -> None:
    """Raise for what `configure_model` left on the meta device, and nobody would give values.

    Args:
        module: built.
        name: of the strategy.
        parameters_too: whether the strategy needs parameters with values, too.

    Raises:
        ValueError: a buffer, or a parameter, is on the meta device.
    """
    held = [("Buffer", *of) for of in module.named_buffers()]
    held += [("Parameter", *of) for of in module.named_parameters() if parameters_too]
    for kind, of, tensor in held:
        if tensor.is_meta and not isinstance(tensor, StandIn):
            only = "" if parameters_too else ", or register buffers in a block without it; parameters may stay there"
            raise ValueError(
                f"{kind} `{of}` is on the meta device, and {name} does not know its values. Build the layers of"
                f' configure_model() without torch.device("meta"){only}.'
            )


def refuse_saving_pretrained(module: LightningModule, share: str, remedy: str) -> Callable[[], None]:
    """Have models of `transformers` say in words what `save_pretrained` cannot write.

    Args:
        module: which may hold such models.
        share: what a rank has of one.
        remedy: what to do, up to saving a checkpoint.

    Returns:
        What takes it away.
    """

    def says(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"save_pretrained would write this rank's {share} alone. {remedy} trainer.save_checkpoint(path) on every"
            ' rank, and in one process module.load_state_dict(torch.load(path)["state_dict"]) and then save_pretrained.'
        )

    models = [part for part in module.modules() if callable(getattr(part, "save_pretrained", None))]
    for part in models:
        part.__dict__["save_pretrained"] = says

    def undo() -> None:
        for part in models:
            part.__dict__.pop("save_pretrained", None)

    return undo


def _refuse_iterators(module: LightningModule, name: str, step: str) -> None:
    method = getattr(module, step)
    if method is not None and is_param_in_hook_signature(method, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name} hands every rank the batch and cuts it into micro-batches: it cannot run {step}(dataloader_iter)."
            f" Write {step}(self, batch, batch_idx)."
        )


def _refuse_batch_size_finder(trainer: Trainer, name: str) -> None:
    callbacks: list[Callback] = cast(Any, trainer).callbacks
    if any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        raise ValueError(
            f"{name} cannot run the batch size finder (Tuner.scale_batch_size, BatchSizeFinder): it tries sizes until a"
            " process runs out of memory, and each process saves and restores alone. Set the batch size, and"
            " num_microbatches so that a micro-batch fits."
        )
