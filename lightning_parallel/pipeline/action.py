"""One piece of work in a schedule, and its text.

The text is that of the literature and of ``torch.distributed.pipelining``: ``2F0`` is the forward of micro-batch 0 on
stage 2. What the literature's letters do not say follows as a suffix: ``2F0r1`` runs on replica 1, ``2F0s3`` on token
slice 3, ``2F0v5`` reads weight version 5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

Kind = Literal["F", "B", "I", "W", "U"]
KINDS = ("F", "B", "I", "W", "U")

_ACTION = re.compile(r"(\d+)([FBIWU])(\d+)(?:r(\d+))?(?:s(\d+))?(?:v(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one rank: a kind, a stage and a micro-batch.

    Kinds: ``F`` forward, ``B`` whole backward, ``I`` gradient of the stage's input, ``W`` gradient of its weights
    (I and W together are B), ``U`` weight update. For U, ``microbatch`` counts the updates of the stage.

    Args:
        kind: one of F, B, I, W, U.
        stage: which stage of the model, counted along the forward.
        microbatch: which micro-batch, 0 to M-1.
        replica: which copy of the pipeline, for schedules that run two directions at once.
        slice: which piece of the sequence, or None for the whole.
        version: which weights the action reads, or None for the newest.

    Example:
        >>> str(Action("F", stage=2, microbatch=0))
        '2F0'
        >>> Action.parse("1W3r1")
        Action(kind='W', stage=1, microbatch=3, replica=1, slice=None, version=None)
    """

    kind: Kind
    stage: int
    microbatch: int
    replica: int = 0
    slice: int | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"An action's kind is one of {', '.join(KINDS)}, got {self.kind!r}.")

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        text += f"r{self.replica}" if self.replica else ""
        text += "" if self.slice is None else f"s{self.slice}"
        return text if self.version is None else f"{text}v{self.version}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Action, (self.kind, self.stage, self.microbatch, self.replica, self.slice, self.version)

    @property
    def key(self) -> Action:
        """The action without its weight version: what other actions depend on."""
        return self if self.version is None else replace(self, version=None)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form, the inverse of ``str``.

        Raises:
            ValueError: the text is not an action of computation.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text.strip()!r} is not an action. Write [stage][kind][micro-batch], such as 2F0, with kind one of "
                f"{', '.join(KINDS)}; optional suffixes are r[replica], s[slice], v[version]. "
                "Actions of communication do not belong in a schedule."
            )
        stage, kind, microbatch, replica, piece, version = match.groups()
        numbers = (int(replica or 0), None if piece is None else int(piece), None if version is None else int(version))
        return cls(cast(Kind, kind), int(stage), int(microbatch), *numbers)
