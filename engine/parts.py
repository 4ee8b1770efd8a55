"""The device-specific parts from which `engine.build` makes an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapters.loading import LayOut
from engine.buffers import InputBuffers
from engine.config import ResolvedConfig
from engine.kv_cache import KvCache
from engine.ports import Drafting
from engine.runner import StepModel

if TYPE_CHECKING:
    from engine.gpu.choosing import TokenChooser
    from kernels.program import PauseFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one device.

    Attributes:
        lay_out: converts a loaded adapter to the device's weight layout.
        choose: see `engine.sampling.sampler.Sampler`.
        pause_wish: see `engine.engine.Engine`.
        steps_ahead: see `engine.runner.Runner`.
        draft_model: see `engine.scheduling.scheduler.Scheduler`.
    """

    config: ResolvedConfig
    buffers: InputBuffers
    model: StepModel
    cache: KvCache
    lay_out: LayOut
    choose: TokenChooser | None = None
    pause_wish: PauseFlag | None = None
    steps_ahead: int = 0
    draft_model: Drafting | None = None
