from __future__ import annotations

import torch

from kernels.architecture import current, pretending


def test_launches_are_shaped_for_the_gpu_that_is_pretended() -> None:
    with pretending("gfx942"):
        assert current() == "gfx942"
    assert current() == ("sm_80" if not torch.cuda.is_available() else current())
