from __future__ import annotations

import numpy as np
import torch

from engine.placing import placed


def test_numbers_lie_as_they_were_named() -> None:
    assert torch.equal(placed([(1, 2), (3, 4)], torch.device("cpu")), torch.tensor([[1, 2], [3, 4]]))
    assert placed([0.5], torch.device("cpu"), torch.float32).dtype == torch.float32
    assert placed([], torch.device("cpu")).dtype == torch.int64
    assert placed(np.array([True, False]), torch.device("cpu"), torch.bool).tolist() == [True, False]
