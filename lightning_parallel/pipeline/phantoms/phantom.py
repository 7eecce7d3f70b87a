"""What happens when a Phantom is used: arithmetic on shapes, or with the value it is bound to, or an error.

The one idea: every use passes here, as a function of torch's (`__torch_function__`: what the user wrote, which is
remembered) and as the operators that it is made of (`__torch_dispatch__`: of which the shapes are inferred).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.phantoms import foreach
from lightning_parallel.pipeline.phantoms.errors import PhantomError, Unread, unread
from lightning_parallel.pipeline.phantoms.outside import is_allowed
from lightning_parallel.pipeline.phantoms.recipes import draws, recipe_of, remember
from lightning_parallel.pipeline.phantoms.shapes import infer, made_real
from lightning_parallel.pipeline.phantoms.stand_in import StandIn
from lightning_parallel.pipeline.phantoms.writes import refuse_reshape, refuse_writes
from lightning_parallel.pipeline.stage.derivatives import RUNS_IT, is_derivative

_READS_DATA = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"}
# Types of arguments that neither are nor hold Phantoms.
PLAIN = {Tensor, nn.Parameter, bool, int, float, str, type(None)}


class Phantom(StandIn):
    """What another stage holds, as the user's step sees it; its attributes are `StandIn`'s."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = phantoms_in(args) + phantoms_in(kwargs)
        for x in leaves:
            if x.value is not None:
                return func(*with_values(args), **with_values(kwargs))
            if x.stands_for != "value" and is_derivative(func):
                raise PhantomError(
                    f"The step takes a derivative by {x.origin}, which this stage does not hold. {RUNS_IT} Gradients"
                    " are of a rank's own rows there, as under DistributedDataParallel."
                )
            if x.stands_for != "value" and not is_allowed(func):
                raise Unread(unread(x, f"`{func.__name__}` uses it outside its module"))
        if is_derivative(func):
            raise PhantomError(
                f"The step takes a derivative of {leaves[0].origin}, which this stage does not hold. {RUNS_IT}"
            )
        if func.__name__ in _READS_DATA:
            raise Unread(unread(leaves[0], f"`{func.__name__.strip('_')}` reads its data"))
        recipe = recipe_of(func, args, kwargs)
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                result = func(*args, **kwargs)
        except RuntimeError as error:
            if "its data is not allocated" not in str(error):
                raise
            raise Unread(unread(leaves[0], f"`{func.__name__}` reads its data")) from error
        remember(recipe, leaves, result)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any operation on a Phantom runs on meta tensors and gives a Phantom."""
        kwargs = dict(kwargs or {})
        if func._schema.name.startswith("aten::_foreach_") and (real := foreach.positions_without(args, phantoms_in)):
            return foreach.apart(func, args, kwargs, real)
        first = (phantoms_in(args) or phantoms_in(kwargs))[0]
        written = refuse_writes(func, args, kwargs, first) if func._schema.is_mutable else None
        if torch.Tag.nondeterministic_seeded in func.tags:
            func(*made_real(args), **made_real(kwargs))
            draws.count += 1
        device = first.device
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        try:
            result = infer(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise Unread(unread(first, f"`{func}` has no answer from shapes alone ({error})")) from error
        if written is not None:
            refuse_reshape(func, written, result)
            for leaf in written.leaves or (written,):
                leaf.spoilt = True
            return written
        if isinstance(result, Tensor):
            return Phantom(result, device, first.origin)
        return tree_map_only(Tensor, lambda t: Phantom(t, device, first.origin), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Phantom(shape={tuple(self.meta.shape)}, dtype={self.meta.dtype}, stands for {self.origin})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Phantom:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PhantomError(
            f"This process does not hold {self.origin} and cannot save it. Use trainer.save_checkpoint(path) on every"
            " rank: it gathers the whole model."
        )


def bound(x: Phantom) -> Tensor:
    """The value a Phantom was bound to, or the Phantom itself."""
    return x if x.value is None else x.value


def phantoms_in(tree: Any) -> list[Phantom]:
    """The Phantoms in nested tuples, lists and dicts, in order. (By hand: it runs with every call of every block.)"""
    if isinstance(tree, Phantom):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [phantom for x in tree if type(x) not in PLAIN for phantom in phantoms_in(x)]


def with_values(tree: Any) -> Any:
    """Nested tuples, lists and dicts with every bound Phantom replaced by its value."""
    return tree_map_only(Phantom, bound, tree)
