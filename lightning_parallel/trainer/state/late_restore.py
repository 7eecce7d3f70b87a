"""A checkpoint's weights and callbacks are restored when the strategy has cut the model, and before `on_fit_start`.

The one idea: Lightning restores them before a strategy's `setup`, or (`restore_checkpoint_after_setup`) behind
`on_fit_start`, where callbacks look at what they have restored, and then forgets `weights_only`. What it asks for
before `setup` is noted, and done at the end of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_RESTORE = "_restore_modules_and_callbacks"


class LateRestore:
    """Puts off what a Trainer's next run restores, until it is called.

    Args:
        trainer: whose run begins.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._connector: Any = cast(Any, trainer)._checkpoint_connector
        self._asked: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._connector.__dict__[_RESTORE] = self._note

    def _note(self, *args: Any, **kwargs: Any) -> None:
        self._asked = args, kwargs

    def __call__(self) -> None:
        """Restore what was asked for."""
        self.end()
        if self._asked is not None:
            args, kwargs = self._asked
            getattr(self._connector, _RESTORE)(*args, **kwargs)

    def end(self) -> None:
        """The run is over, or restores at once from now on."""
        self._connector.__dict__.pop(_RESTORE, None)
