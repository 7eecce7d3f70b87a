"""A tensor plan for any module of the suite, so that a tensor axis has something to divide in each.

The one idea: in a sequence a linear layer is cut by columns and the next one by rows, where only functions of single
features lie between them; every other linear layer is cut by columns whose results are gathered. Names are told, since
`auto` looks for the names of published models.
"""

from collections.abc import Iterator

from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel.strategies import HybridStrategy

ELEMENTWISE = (nn.Tanh, nn.ReLU, nn.GELU)


def told(strategy: HybridStrategy) -> HybridStrategy:
    """The strategy, which gets a plan that names the modules of whatever it is to train."""
    connect = strategy.connect

    def with_plan(model: LightningModule) -> None:
        strategy.tensor_plan = plan_of(model)
        connect(model)

    strategy.connect = with_plan  # type: ignore[method-assign]
    return strategy


def plan_of(model: nn.Module) -> dict[str, str]:
    """Styles of all linear layers, but for those that share parameters with another module."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    alone = {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and all(owners[id(p)] == 1 for p in module.parameters())
    }
    plan = dict.fromkeys(sorted(alone), "vocab")
    for first, second in pairs(model):
        if {first, second} <= alone and plan[first] == "vocab":
            plan |= {first: "colwise", second: "rowwise"}
    return plan


def pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of linear layers in a sequence with nothing but functions of single features between them."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential):
            continue
        before = ""
        for child_name, child in module.named_children():
            if type(child) is nn.Linear:
                full = f"{name}.{child_name}" if name else child_name
                if before:
                    yield before, full
                before = full
            elif not isinstance(child, ELEMENTWISE):
                before = ""
