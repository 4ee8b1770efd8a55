from __future__ import annotations

import torch

from kernels.architecture import bounded, current, pretending


def test_launches_are_shaped_for_the_gpu_that_is_pretended() -> None:
    with pretending("gfx942"):
        assert current() == "gfx942"
    assert current() == ("sm_80" if not torch.cuda.is_available() else current())


def test_registers_are_bounded_where_the_compiler_knows_how() -> None:
    with pretending("sm_90"):
        assert bounded(128) == {"maxnreg": 128}
        assert not bounded(None)
    with pretending("gfx942"):
        assert not bounded(128)
