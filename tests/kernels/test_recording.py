from __future__ import annotations

import triton

from kernels.recording import recording


def test_recording_ends_with_its_block() -> None:
    run = triton.JITFunction.run
    with recording():
        assert triton.JITFunction.run is not run
    assert triton.JITFunction.run is run
