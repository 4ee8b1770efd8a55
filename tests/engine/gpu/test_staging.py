"""Numbers reach the device in order (`test_inputs.py` sends every step by it), and take no other thread's time."""

from __future__ import annotations

from tests.interpreter.uninterpreted import run_uninterpreted

SENDING = """
import os
from types import SimpleNamespace
import numpy as np
import torch
from engine.gpu.staging import Staging

COUNT = 200_000

def numbers(count=COUNT):
    return torch.from_numpy(np.zeros(count, dtype=np.int64))

def num_threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
runtime = SimpleNamespace(device=torch.device("meta"), staging=numbers, fence=lambda: lambda: None)
staging, source, other = Staging(COUNT, runtime), numbers(), numbers()
before = num_threads()
for _ in range(3):
    staging.send(source)
assert num_threads() == before, "others took part"
other.copy_(source)
assert num_threads() > before, "nobody would have noticed"
"""


def test_a_large_step_is_copied_by_the_thread_that_sends_it() -> None:
    """Torch would wake a thread for each core in every step, and wait for the slowest."""
    run_uninterpreted("-c", SENDING)
