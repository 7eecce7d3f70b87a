"""`Sharding`: modules made FSDP2's for the time of a run, and given back as they were.

The one idea: `fully_shard` changes a module's class, its hooks and its parameters. What it adds is noted while it does
so, and taken away at the end; so the same module may train again, on other ranks or none, without knowing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import pairwise
from types import MappingProxyType, MethodType
from typing import Any, Literal, cast

from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors

from lightning_parallel.zero.closed_parameters import lose
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.fsdp2.shards import groups_of
from lightning_parallel.zero.fsdp2.writes import cut_loaded
from lightning_parallel.zero.module_footprints import Footprints

Prefetch = Literal["none", "forward", "both"]


class Sharding:
    """Shards blocks, then the roots that hold what is left.

    Args:
        module: the whole.
        blocks: in the order in which a forward calls them.
        roots: the module itself, or those of its children that are called by themselves.
        methods: names of the module's methods that are called in place of its forward.
        prefetch: gather a block while the one before it computes: in no way, on the way "forward" or on "both".
        of_roots: options of `fully_shard` that are others for roots.
        **options: of `fully_shard`.

    Attributes:
        parts: the modules that were sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        roots: Sequence[nn.Module],
        methods: Sequence[str] = (),
        prefetch: Prefetch = "none",
        of_roots: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.module = module
        self._footprints = Footprints(module.modules())
        self.parts: list[FSDPModule] = []
        for part in [*blocks, *roots]:
            if next(part.parameters(), None) is not None and not isinstance(part, FSDPModule):
                kind = type(part)
                _refuse_mixed(part)
                fully_shard(part, **{**options, **(of_roots if any(part is root for root in roots) else {})})
                type(part).__name__ = kind.__name__  # summaries and profilers show it
                self.parts.append(cast(FSDPModule, part))
        if isinstance(module, FSDPModule):
            _gather_around(module, methods)
        for block, following in pairwise(blocks) if prefetch != "none" else ():
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
            if prefetch == "both":
                following.set_modules_to_backward_prefetch([block])  # type: ignore[operator]
        for part in module.modules():
            if any(isinstance(p, DTensor) for p in part._parameters.values()):
                part.register_load_state_dict_pre_hook(cut_loaded)
        self._footprints.noted()

    def free(self) -> None:
        """Free what a forward without a backward left gathered; after an optimizer's step it would be out of date."""
        for part in self.parts:
            part.reshard()

    def undo(self, failed: bool = False) -> dict[nn.Parameter, nn.Parameter]:
        """Every parameter becomes a whole one on the host, on every rank; the modules are as they were. Collective, but
        after a failure: then a parameter is lost of which another rank has a shard.

        Returns:
            For each sharded parameter what is in its place now.
        """
        if failed:
            for part in self.parts:
                _put_shards_back(part)
        whole = lost_parameters(self.module) if failed else whole_parameters(self.module)
        for module in self._footprints.remove():
            _module_state_mapping.pop(module, None)
            _forget_late_hooks(module)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = whole.get(parameter, parameter)
        return whole


def _refuse_mixed(part: nn.Module) -> None:
    """Raise for what FSDP2 would gather at once and cannot."""
    dtypes = sorted({str(p.dtype) for p in part.parameters() if p.requires_grad and not isinstance(p, DTensor)})
    if len(dtypes) > 1:
        raise ValueError(
            f'engine="fsdp2" gathers what {type(part).__name__} holds at once, and its parameters are of'
            f" {' and '.join(dtypes)}. Make them of one dtype, name blocks= that are of one each, or use"
            ' ZeROStrategy(stage=2, engine="native").'
        )
    for name, module in part.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f'engine="fsdp2" reduces dense gradients, and `{name}` makes sparse ones. Use sparse=False.'
            )


def whole_parameters(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """For each sharded parameter of a module a whole one on the host; all ranks call it."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            values = parameter.full_tensor().detach().cpu().clone()
            found[parameter] = nn.Parameter(values, parameter.requires_grad)
    return found


def lost_parameters(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """For each sharded parameter of a module one whose values raise, or a whole one where this rank has all of it."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local().detach()
            whole = local.numel() == parameter.numel()
            values = local.view(parameter.shape).clone() if whole else local.new_empty(0)
            found[parameter] = nn.Parameter(values, parameter.requires_grad)
            if not whole:
                lose(found[parameter], clean_name(name), parameter.shape)
    return found


def _forget_late_hooks(module: nn.Module) -> None:
    """Hooks of state dicts, which FSDP2 registers in the first forward."""
    for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            function = getattr(hook, "hook", hook)
            if (getattr(function, "__module__", None) or "").startswith("torch.distributed.fsdp"):
                del hooks[key]


def _put_shards_back(part: Any) -> None:
    """A step may have failed between a block's gather and its end: the module has its shards again, nobody is asked."""
    for group in groups_of(part):
        for parameter in group.fsdp_params:
            parameter._setattr_on_modules(parameter.sharded_param)
        group._to_sharded()


def _gather_around(module: Any, methods: Sequence[str]) -> None:
    """Methods are forwards too, and a forward within one is a part of it.

    To FSDP2 it would be a second one: what lies outside of blocks would be freed behind it, and gathered once more.
    """
    state = module._get_fsdp_state()
    if not hasattr(state, "_pre_forward_hook_handle"):  # another version of PyTorch than those that were read
        for name in methods:
            register_fsdp_forward_method(module, name)
        return
    inside = _Inside(module, state)
    for name in methods:
        setattr(module, name, MethodType(inside.around(getattr(module, name)), module))


class _Inside:
    """Knows whether a method of a sharded module runs, and hooks its forward so that it then gathers nothing."""

    def __init__(self, module: Any, state: Any) -> None:
        self.module, self.state, self.runs = module, state, False
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method with a gather before it."""

        @wraps(method)
        def run(_: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.state._pre_forward(self.module, args, kwargs)
            before, self.runs = self.runs, True
            try:
                output = method(*args, **kwargs)
            finally:
                self.runs = before
            return self.state._post_forward(self.module, args, output)

        return run

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self.runs:
            return self._cast(args, kwargs)
        return self.state._pre_forward(module, args, kwargs)

    def _cast(self, args: Any, kwargs: Any) -> Any:
        """Inputs in the dtype of the forward; from PyTorch 2.13 on the state has a method of its own for it."""
        if hasattr(self.state, "_cast_forward_inputs"):
            return self.state._cast_forward_inputs(args, kwargs)
        policy = self.state._mp_policy
        if not (policy.cast_forward_inputs and policy.param_dtype):
            return args, kwargs
        cast = partial(_cast_fp_tensor, policy.param_dtype)
        return _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        return output if self.runs else self.state._post_forward(module, args, output)
