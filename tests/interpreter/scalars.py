"""Mends the interpreter of Triton 3.6, whose bounds of loops are arrays that NumPy 2.4 takes for no numbers."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Change the interpreter."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
