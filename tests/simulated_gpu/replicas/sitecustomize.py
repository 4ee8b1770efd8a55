"""Lets a process of a server simulate a GPU, if an engine is built in it: Python imports this where it starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Before(MetaPathFinder, Loader):
    """Imports a module with a GPU simulated for it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "engine.build":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.loader is not None
        self._loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import pytest

        from tests.interpreter.prepare import prepare
        from tests.parity.gpu_parts import Replays

        prepare()
        Replays(pytest.MonkeyPatch())


sys.meta_path.insert(0, _Before())
