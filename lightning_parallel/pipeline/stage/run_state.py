"""What a run of the user's step as one stage knows, and what it says where it cannot go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.phantom import Phantom, phantoms_in
from lightning_parallel.pipeline.phantoms.stand_in import Leaf
from lightning_parallel.pipeline.stage import calls
from lightning_parallel.pipeline.stage.calls import ONCE, StopRule
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.pipeline.stage.stage_values import Place, StageEntry, StageExit, StageValues

UnitOutputs = dict[str, Any]  # unit name -> what it returned, with TensorMeta in place of tensors


class RunState:
    """One run of the user's step as one stage on one micro-batch.

    Args:
        learn: describe in `record` what this stage's units return.
        again: whether this micro-batch ran before (keeping nothing, or to learn from it).
        keep: what is sent, to the next stage or further on; None where that is all that the next stage's first block is
            called with, and nothing else.
        made_for: positions among the first block's arguments of what the stage before would only compute for this one;
            with `learn`, they are computed here, if they can be.
        going: when the run is over, and whether it only finds that out.
        inputs: received values by their position among the first block's arguments (those of its later calls counted
            on), and units' results by `Leaf`.

    Attributes:
        known: what the units of other stages return.
        exits, after_exit: how often that block was called, and how many calls of this stage's units came since.
        record: if not None, filled with what this stage's units return.
        called: how often each unit was called so far, by name.
        began: which call of a unit began with which random stream; a recomputation begins with the same.
        is_last: whether the step runs to its end.
        has_ended: whether it did.
        doubt: what is wrong with the order of calls, should it turn out to be.
        plain: whether a call only computes: nothing is to be learnt, kept for later or recomputed.
    """

    def __init__(
        self,
        cut: CutModel,
        stage: int,
        microbatch: int,
        key: int,
        inputs: Mapping[Place, Tensor],
        known: UnitOutputs,
        learn: bool,
        again: bool = False,
        keep: Collection[Place] | None = None,
        going: StopRule = ONCE,
        made_for: Collection[int] = (),
    ) -> None:
        self.cut, self.stage, self.microbatch, self.key = cut, stage, microbatch, key
        self.is_last = stage == cut.layout.num_stages - 1
        self.known = known
        self.record: UnitOutputs | None = {} if learn else None
        self._stage_values = StageValues(inputs, keep, learn)
        self._entry, self._exit = StageEntry(stage, self._stage_values, made_for), StageExit(self._stage_values)
        self.called: dict[str, int] = {}
        self.began: dict[tuple[str, int], int] = {}
        self.again, self.going = again, going
        self.exits = self.after_exit = 0
        self.has_ended, self.doubt = False, ""
        self._recomputes_blocks = cut.recomputes_blocks(stage)
        sends_results = any(isinstance(place, tuple) for place in keep or ())
        self.plain = (
            not learn and not self._recomputes_blocks and not sends_results and not going.after and cut.windows is None
        )
        self._is_divided = cut.layout.num_stages > 1 or cut.windows is not None
        self._replaying, self._inside = False, 0  # how many calls of units are under way
        self._first_block = cut.layout.bounds[stage]

    @property
    def inputs(self) -> Mapping[Place, Tensor]:
        """What came in."""
        return self._stage_values.inputs

    @property
    def needed(self) -> tuple[int, ...] | None:
        """Positions of the arguments that were Phantoms at the first block, in order; None before it is reached."""
        return self._entry.needed

    @property
    def wanted(self) -> tuple[Leaf, ...]:
        """What else of earlier units was needed, in order."""
        return tuple(self._stage_values.wanted)

    @property
    def wanted_for(self) -> Mapping[int, tuple[Leaf, ...]]:
        """What of earlier units was needed for nothing but an output, by its position (with `learn` and `keep`)."""
        return self._exit.wanted_for

    @property
    def by_position(self) -> Collection[Leaf]:
        """Units' results that are among the first block's arguments."""
        return self._entry.by_position

    @property
    def outputs(self) -> dict[Place, Any] | None:
        """What may be sent, see `StageExit`; set where the next stage's first block is called."""
        return self._exit.outputs

    def drop_outputs(self) -> None:
        """They have been sent."""
        self._exit.outputs = None

    def realized(self, tree: Any) -> Any:
        """A structure with the values of its Phantoms, fetched and computed where they can be."""
        return self._stage_values.realized(tree)

    def refuse_written(self, places: Iterable[Place]) -> None:
        """Raise if outputs are not what they were when the next stage's first block was called."""
        place = self._stage_values.written(self.outputs or {}, places)
        if place is not None:
            raise PhantomError(calls.written_to(self.stage, self.cut.first_block(self.stage + 1), place))

    def _refuse_phantoms(self, tree: Any, doing: str, remedy: str | None = None) -> None:
        for leaf in phantoms_in(tree) if isinstance(tree, (Tensor, tuple)) else tree_flatten(tree)[0]:
            if isinstance(leaf, Phantom) and leaf.value is None:
                known = calls.LATER if self._comes_later(leaf) else remedy or self._remedy(leaf.origin)
                raise PhantomError(
                    f"The step {doing} a value computed from {leaf.origin}, whose data stage {self.stage} does not"
                    f" hold. {known}"
                )

    def _comes_later(self, phantom: Phantom) -> bool:
        """Whether a Phantom was computed from what a later stage returns."""
        roots = [calls.name_of(leaf.leaf[0]) for leaf in phantom.leaves or (phantom,) if leaf.leaf is not None]
        return any(unit.stage > self.stage for unit in self.cut.layout.units if unit.name in roots)

    def _remedy(self, origin: str) -> str:
        """What to do about a value that this stage lacks."""
        for unit in self.cut.layout.units:
            if unit.block is None and origin.startswith(f"parameter `{unit.name}."):
                return f"Move its module with {calls.moved(unit.name, self.stage)}."
        return calls.NEARER
