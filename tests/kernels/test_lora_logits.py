from __future__ import annotations

import torch

from kernels.lora_logits.reference import lora_logits


def test_each_segment_is_multiplied_by_its_own_matrix_and_the_rest_stays() -> None:
    x, logits = torch.randn(6, 4), torch.full((6, 3), 7.0)
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    lora_logits(x=x, logits=logits, weights=[first, second], segments=[(0, 2), (3, 5)])
    torch.testing.assert_close(logits[:2], x[:2] @ first.T)
    torch.testing.assert_close(logits[3:5], x[3:5] @ second.T)
    assert (logits[[2, 5]] == 7).all()
