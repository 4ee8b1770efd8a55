"""transformers without torch: what handles text needs none, and it would be a third of a gigabyte in every process.

transformers looks for torch once, as it is first imported. Where torch is imported already it costs nothing more, and
nothing is hidden.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any


def auto_tokenizer() -> Any:
    """Return transformers' `AutoTokenizer`, imported without torch unless this process has it."""
    with _torch_hidden():
        from transformers import AutoTokenizer
    return AutoTokenizer


@contextmanager
def _torch_hidden() -> Iterator[None]:
    if "torch" in sys.modules:
        yield
        return
    find_spec = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" or name.startswith("torch.") else find_spec(name, package)

    importlib.util.find_spec = find_others
    # It would advise everybody to install torch.
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        importlib.util.find_spec = find_spec
