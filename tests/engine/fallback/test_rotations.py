"""Rotations are left to attention where it gets exactly what was rotated, and nowhere else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.fallback.rotations import FUNCTION, LaterRotations, NotedRotations, Rotation
from engine.fallback.spec import FallbackSpec
from engine.loading.spec import read_model_spec
from kernels.rope_kv_write.reference import rotate
from tests.engine.fallback.saved import save

EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
ATTENTION = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, ...]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + rotate_half(x) * sin for x in (q, k))


class Attention(nn.Module):
    """Rotates as most models do, and then gives attention the results, or something else."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = apply_rotary_pos_emb(*parts)
        return (q, k) if self.factor == 1.0 else (q * self.factor, k)


def parts(head_dim: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(4)
    shapes = ((1, 2, 3, head_dim), (1, 1, 3, head_dim), (1, 3, head_dim), (1, 3, head_dim))
    return [torch.randn(shape, generator=numbers).to(dtype) for shape in shapes]


def test_a_rotation_is_noted_if_attention_gets_its_results() -> None:
    noted = NotedRotations()
    plain, scaled = Attention(), Attention(0.5)
    noted.watch("plain", plain)
    noted.watch("scaled", scaled)
    query, key = plain(*parts())
    assert noted.of(key, query) is None, "not the other way round"
    query, key = plain(*parts())
    assert noted.of(query, key) == Rotation("plain", 8)
    assert noted.of(query, key) is None, "once"
    assert noted.of(*scaled(*parts())) is None


def test_angles_of_another_dtype_are_left_where_they_are() -> None:
    noted, module = NotedRotations(), Attention()
    noted.watch("attention", module)
    query, key, *_ = parts(dtype=torch.bfloat16)
    assert noted.of(*module(query, key, *parts()[2:])) is None


def test_a_function_that_takes_other_shapes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was refused, because the trial failed."""
    monkeypatch.setitem(globals(), FUNCTION, partial(apply_rotary_pos_emb, unsqueeze_dim=2))
    noted, module = NotedRotations(), Attention()
    noted.watch("attention", module)
    query, key, *angles = parts()
    assert noted.of(*module(query.transpose(1, 2), key.transpose(1, 2), *angles)) is None


def test_a_step_puts_rotations_off_and_no_other_call_does() -> None:
    later, module = LaterRotations(), Attention()
    later.put_off(module)
    query, key, cos, sin = parts()
    rotated = module(query, key, cos, sin)
    assert torch.equal(rotated[0], apply_rotary_pos_emb(query, key, cos, sin)[0])
    assert later.table(query, key) is None
    later.begin()
    found = module(query, key, cos, sin)
    assert found[0] is query
    assert found[1] is key
    table = later.table(query, key)
    assert table is not None
    for now, then in zip((query, key), rotated, strict=True):
        torch.testing.assert_close(rotate(now[0].transpose(0, 1), table, 8).transpose(0, 1), then[0])
    assert later.table(query, key) is None, "the next layer may have no rotation"
    module(query, key, cos, sin)
    assert later.table(query, key) is table, "of all layers with these angles"
    module(query, key, cos, sin)
    with pytest.raises(AssertionError, match="another one"):
        later.table(query.clone(), key)
    later.end()
    assert torch.equal(module(query, key, cos, sin)[0], rotated[0])


@pytest.mark.parametrize(
    ("architecture", "fields", "dims"),
    [
        ("SeedOssForCausalLM", {}, [8, 8]),
        ("StableLmForCausalLM", {}, []),  # rotates a part of each head, and puts it together again
        (
            "Glm4MoeForCausalLM",
            {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
            [4, 4],
        ),
        ("Glm4ForCausalLM", {}, []),  # pairs of neighbors
        ("CohereForCausalLM", {}, []),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2}, []),  # learned positions
    ],
)
def test_which_architectures_leave_rotations_to_attention(
    tmp_path: Path, architecture: str, fields: dict[str, Any], dims: list[int]
) -> None:
    spec = read_model_spec(str(save(tmp_path, architecture, **fields)))
    assert isinstance(spec, FallbackSpec)
    assert list(spec.rotating_modules) == ATTENTION[: len(dims)]
    assert dims in ([form.rope.rotary_dim(8) for form in spec.layers], [])
