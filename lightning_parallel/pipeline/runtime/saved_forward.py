"""What a forward leaves for its backward.

The one idea: where gradients enter the graph is kept, not the tensors that were sent, which may be freed when they have
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.pipeline.stage.boundary import RecvBoundary, SendBoundary
from lightning_parallel.pipeline.stage.contract import Contract
from lightning_parallel.pipeline.stage.received_values import ReceivedValues
from lightning_parallel.pipeline.stage.stage_run import StageRun
from lightning_parallel.pipeline.stage.stage_values import Place


@dataclass
class SavedForward:
    """A forward that waits for its backward.

    Args:
        inbox: what came in.
        came: over which boundaries, and what was agreed there; that to the stage before is first.
        left: the same of what was sent; empty on the last stage.
        run: the forward, None if it could not run.
        edges: where the gradient of a value that was sent enters the graph.
        loss: on the last stage.
        again: the forward has to run again before its backward.
    """

    inbox: ReceivedValues
    came: list[tuple[RecvBoundary, Contract]] = field(default_factory=list)
    left: list[tuple[SendBoundary, Contract]] = field(default_factory=list)
    run: StageRun | None = None
    edges: dict[Place, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    again: bool = False

    def roots(self) -> Sequence[Any]:
        """Where the backward begins."""
        if self.run is None:
            return []
        return [self.edges[place] for _, of in self.left for place in of.with_gradient()] if self.left else [self.loss]

    def keep_edges(self) -> None:
        """Of what the run made, keep where gradients enter."""
        run = self.run
        assert run is not None and run.outputs is not None
        for _, contract in self.left:
            run.refuse_written(contract.travelling())
            for place in contract.travelling():
                if contract.values[place][1]:
                    self.edges[place] = get_gradient_edge(run.outputs[place])
        run.drop_outputs()
