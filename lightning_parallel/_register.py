"""Register the strategy strings once Lightning is there, without importing Lightning for it.

Lightning has no entry points for strategies, so somebody has to call its registry. Importing Lightning takes seconds,
and half of this package does not need it; so where Lightning is not imported yet, one import hook waits for it, fires
once, and takes itself away.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LIGHTNING = "lightning.pytorch"


def register_with_lightning() -> None:
    """Register the strategy strings now if Lightning is imported, else at the moment that it is."""
    if _LIGHTNING in sys.modules and not _is_loading(sys.modules[_LIGHTNING]):
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    # Where our strategies are what imports Lightning, they register themselves when they are done.
    ours = sys.modules.get("lightning_parallel.strategies")
    if ours is None or not _is_loading(ours):
        importlib.import_module("lightning_parallel.strategies.registry")


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _AfterImport(MetaPathFinder):
    """Finds nothing itself: lets the others find Lightning, and has its loader call us when it is done."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register()
