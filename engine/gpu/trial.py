"""Decode steps tried at start: recorded, they must compute what they compute when launched kernel by kernel.

Launched, kernels hardly overlap, as the host takes longer to launch one than the device to run it. Recorded, they do.
What makes recordings faster is given up, one thing after the other, until all steps are right: with a driver or on a
GPU on which something fails, the server is slower, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
from triton.errors import TritonError

from engine.gpu import backend, runtime
from engine.gpu.runtime import CudaRuntime
from kernels import overlap

_logger = logging.getLogger(__name__)

TOLERANCE = 0.02
"""Allowed difference, relative to the largest logit: without fused kernels, other roundings are as right."""

NUM_REPLAYS = 20 if overlap.CAN_WAIT else 1
"""Replays of each recorded step: kernels that overlap and do not wait for each other may be right many times."""

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Switch:
    """A module flag that turns off an optimization.

    Attributes:
        name: of steps without it.
    """

    name: str
    module: ModuleType
    attribute: str

    def turn_off(self) -> None:
        """Turn it off for all engines of this process; what is already recorded stays."""
        setattr(self.module, self.attribute, False)

    @property
    def is_off(self) -> bool:
        """Whether it is off."""
        return not getattr(self.module, self.attribute)


ONE_STREAM = Switch("one-stream", runtime, "BRANCHES_ARE_WANTED")
IN_TURN = Switch("in-turn", overlap, "IS_WANTED")
APART = Switch("apart", backend, "JOINS_ARE_WANTED")
SWITCHES = (ONE_STREAM, IN_TURN, APART)
"""In the order in which they are given up: first what has been tried least."""


@torch.inference_mode()
def settle(steps: Callable[[], Iterable[Step]], gpu: CudaRuntime) -> bool:
    """Turn off what these steps cannot be recorded with; return whether they can be recorded at all.

    Args:
        steps: yields steps that compute the same each time, each until the next is asked for.

    Raises:
        torch.OutOfMemoryError: there is not enough memory for a step.
    """
    while not all(_is_right(step, gpu) for step in steps()):
        left = [switch for switch in SWITCHES if not switch.is_off]
        if not left:
            _logger.error("decode steps are launched, not recorded, which is slow")
            return False
        left[0].turn_off()
        _logger.error("decode steps are tried again without an optimization (%s)", left[0].name)
    return True


def _is_right(step: Step, gpu: CudaRuntime) -> bool:
    try:
        # A copy, because all steps write to one buffer.
        launched = step().clone()
        replay, logits = gpu.record(step)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TritonError) as error:
        _logger.error("a decode step cannot be launched or recorded: %s", error)
        return False
    largest = launched.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    for _ in range(NUM_REPLAYS):
        logits.zero_()
        replay()
        # What is no number in both is the model's own.
        if not torch.allclose(logits, launched, rtol=0, atol=TOLERANCE * largest, equal_nan=True):
            furthest = (logits - launched).abs().max().item()
            _logger.error("logits of a recorded step are wrong by up to %g, where the largest is %g", furthest, largest)
            return False
    return True
