"""Callbacks that hold more of the model than hooks show them: averaged copies of it, its optimizer's groups.

The one idea: they were written for a process that holds the whole model. A copy of the model is cut as the model is, so
that every rank averages its own part and stand-ins meet stand-ins; what such a callback saves is made whole again, and
what it restores is restored at the moment that suits it. Left out: copies that are made after the model was cut (they
share its stand-ins and cannot be saved), and callbacks that read weights for themselves, which are told so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging
from torch import nn

from lightning_parallel.zero.fsdp2.shards import write_whole

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_parallel.parallel.uncut import Uncut
    from lightning_parallel.pipeline.parameters.table import ParameterTable

Whole = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class WholeState:
    """A state-dict hook that puts the whole model's state in place of a rank's part. All ranks have to ask.

    Args:
        whole: makes a state dict whole on global rank 0, and gives nothing elsewhere.
    """

    def __init__(self, whole: Whole) -> None:
        self.whole = whole

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        mine = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        state.update({f"{prefix}{name}": value for name, value in self.whole(mine).items()})


def model_copies(trainer: Trainer, module: LightningModule) -> list[LightningModule]:
    """Copies of the module that callbacks made in `setup`, as those that average weights do."""
    found = {id(copied): copied for callback in _callbacks(trainer) for copied in _copies_in(callback, module)}
    return list(found.values())


def states_of_holders(trainer: Trainer, module: LightningModule) -> dict[str, dict[str, Any]]:
    """The states of callbacks that hold copies of the model, which all ranks make whole together; all call it."""
    return {one.state_key: one.state_dict() for one in _callbacks(trainer) if _copies_in(one, module)}


def before_evaluations_end(trainer: Trainer, module: LightningModule, do: Callable[[], None]) -> None:
    """Have something done before callbacks that hold copies of the model swap weights back behind an evaluation."""
    for callback in _callbacks(trainer):
        if _copies_in(callback, module):
            own = type(callback).on_validation_epoch_end.__get__(callback)

            def first(*args: Any, own: Callable[..., None] = own) -> None:
                do()
                own(*args)

            callback.on_validation_epoch_end = first  # type: ignore[assignment, method-assign]


def let_evaluations_end(trainer: Trainer) -> None:
    """Undo `before_evaluations_end`."""
    for callback in _callbacks(trainer):
        callback.__dict__.pop("on_validation_epoch_end", None)


def _copies_in(callback: Callback, module: LightningModule) -> list[LightningModule]:
    names = [name for name, _ in module.named_parameters()]
    held = [value for value in vars(callback).values() if isinstance(value, nn.Module)]
    found = {id(inner): inner for value in held for inner in value.modules()}
    return [
        inner
        for inner in found.values()
        if isinstance(inner, type(module)) and inner is not module and [n for n, _ in inner.named_parameters()] == names
    ]


def refuse_sharded(trainer: Trainer, module: LightningModule, name: str) -> None:
    """Raise if a callback would put whole weights, or names of all of them, into a sharded checkpoint.

    Raises:
        ValueError: a callback averages weights or finetunes.
    """
    finetuning = any(isinstance(callback, BaseFinetuning) for callback in _callbacks(trainer))
    if finetuning or model_copies(trainer, module):
        raise ValueError(
            f'{name}(state_dict_type="sharded") saves what each rank holds, but a callback that averages weights or'
            ' finetunes saves weights or groups of its own, which are gathered. Use state_dict_type="full".'
        )


def cut_copies(trainer: Trainer, module: LightningModule, table: ParameterTable, tensor: Uncut, whole: Whole) -> None:
    """Leave this rank's part of each copy that a callback holds, and let its state dict be whole."""
    for copied in model_copies(trainer, module):
        like = next(copied.parameters(), None)
        table.drop_foreign(module.device if like is None else like.device, copied)
        tensor.cut_copy(copied)
        if not any(isinstance(hook, WholeState) for hook in copied._state_dict_hooks.values()):
            copied.register_state_dict_post_hook(WholeState(whole))


def hold_whole_states(copied: LightningModule, whole: Whole) -> None:
    """Let the state dict of a callback's copy of the model, which is sharded as the model is, be whole both ways."""
    if any(isinstance(hook, WholeState) for hook in copied._state_dict_hooks.values()):
        return
    copied.register_state_dict_post_hook(WholeState(whole))

    def cut(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        mine = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        state.update({f"{prefix}{name}": value for name, value in write_whole(copied, mine).items()})

    copied.register_load_state_dict_pre_hook(cut)


def tell_whole_groups(
    trainer: Trainer, checkpoint: Mapping[str, Any], groups: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Finetuning callbacks save the names in every group: put in those of all stages.

    Args:
        trainer: its callbacks are searched.
        checkpoint: what is going to be saved.
        groups: for each optimizer the names of each of its groups.
    """
    for callback in _callbacks(trainer):
        if isinstance(callback, BaseFinetuning):
            state = checkpoint.get("callbacks", {}).get(callback.state_key, {})
            for index, told in state.get("internal_optimizer_metadata", {}).items():
                for group, names in zip(told, groups[index] if index < len(groups) else (), strict=False):
                    group["params"] = list(names)


def catch_up(trainer: Trainer, module: LightningModule) -> bool:
    """Do what callbacks do in `on_fit_start` with a restored state: here it is restored after that hook.

    Returns:
        Whether one may have replaced the optimizers' groups.
    """
    finetuning = [callback for callback in _callbacks(trainer) if isinstance(callback, BaseFinetuning)]
    for unfreezing in finetuning:
        BaseFinetuning.on_fit_start(unfreezing, trainer, module)
    for callback in _callbacks(trainer):
        if isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None:
            callback._clear_schedulers(trainer)
    return bool(finetuning)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return cast(Any, trainer).callbacks
