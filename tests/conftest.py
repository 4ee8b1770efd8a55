from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

from kernels import native
from kernels.native import NativeKernels
from tests.interpreter.prepare import prepare

# A shell ignores Ctrl-C for what it starts in the background, and so would every server that a test starts and
# interrupts: whoever ignores a signal hands that down.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine than of the code; and a change is judged by the same examples as
# the one before it. `pytest --hypothesis-profile=search` looks for new ones.
settings.register_profile("search", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")

# Where there is no GPU its kernels run in Triton's interpreter; Triton looks at this as it meets a kernel.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    prepare()

# Threads that spin at barriers make products as small as those of most tests many times slower on a busy machine.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported and collected out of the search for garbage, which took a fifth of the time."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def kernels() -> NativeKernels:
    """The CPU kernels, compiled once for all tests."""
    found = native.load()
    if found is None:
        pytest.skip("there is no C++ compiler here")
    return found


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU, simulated where there is none; what a real one might compute otherwise fails the test."""
    # Imported here: few tests need it, and it imports Triton.
    from tests.simulated_gpu.device import in_order, simulate

    with in_order():
        if not torch.cuda.is_available():
            simulate(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Draw each test's numbers anew from one seed: what it sees does not depend on the tests that ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute by one thread, whatever an engine of more has left behind."""
    torch.set_num_threads(1)
