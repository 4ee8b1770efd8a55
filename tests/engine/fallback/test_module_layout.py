"""What a backend is given to lay out, and what stays with transformers. Tokens are compared in tests/parity."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from engine.backend import Backend, Product
from engine.loading.weight import Weight
from tests.engine.fallback.saved import load, save

PER_LAYER = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 1, "down_proj": 1, "gate_up": 1}


class Counting(Backend):
    def __init__(self) -> None:
        self.laid_out: Counter[str] = Counter()
        self.dtypes: list[torch.dtype] = []

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        self.laid_out[name.rpartition(".")[2]] += 1
        return super().linear(name, weight, bias)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        if weight is not None:
            self.dtypes.append(x.dtype)
        return super().add_rms_norm(x, delta, weight, eps)


def test_gate_and_up_are_one_product(tmp_path: Path) -> None:
    backend = Counting()
    decoder = load(save(tmp_path), backend=backend)
    assert backend.laid_out == {name: count * 2 for name, count in PER_LAYER.items()}
    assert decoder._model is not None
    mlp = decoder._model.model.layers[0].mlp
    assert mlp.gate_proj.weight.numel() == mlp.up_proj.weight.numel() == mlp.down_proj.weight.numel() == 0


def test_a_norm_of_another_dtype_is_left_to_transformers(tmp_path: Path) -> None:
    backend = Counting()
    decoder = load(save(tmp_path), torch.bfloat16, backend)
    assert decoder._model is not None
    norm, x = decoder._model.model.norm, torch.randn(1, 3, 32)
    backend.dtypes.clear()
    assert norm(x).dtype is torch.float32
    assert norm(x.bfloat16()).dtype is torch.bfloat16
    assert backend.dtypes == [torch.bfloat16]
