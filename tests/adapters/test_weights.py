from __future__ import annotations

import torch

from adapters.weights import AdapterWeights, RawProjection
from tests.adapters.handmade import packed


def make_raw(
    ranks: dict[tuple[int, str], int], dtype: torch.dtype = torch.float32
) -> dict[tuple[int, str], RawProjection]:
    torch.manual_seed(0)
    return {
        key: RawProjection(a=torch.randn(rank, 8).to(dtype), b=torch.randn(6, rank).to(dtype), scaling=1.7)
        for key, rank in ranks.items()
    }


def test_modules_of_one_input_are_stacked_each_at_its_own_rank() -> None:
    raw = make_raw({(0, "v_proj"): 3, (0, "q_proj"): 2, (0, "o_proj"): 5, (4, "up_proj"): 1})
    weights = packed(raw, torch.float32)
    group = weights.group(0, ("q_proj", "k_proj", "v_proj"))
    assert group is not None
    assert torch.equal(group.a, torch.cat([raw[(0, "q_proj")].a, raw[(0, "v_proj")].a]))
    assert set(group.projection_by_module) == {"q_proj", "v_proj"}
    for (layer, module), item in raw.items():
        projection = weights.projection(layer, module)
        assert projection is not None
        assert torch.equal(projection.a, item.a)
        torch.testing.assert_close(projection.b, item.b * 1.7)
    assert weights.group(4, ("q_proj", "k_proj", "v_proj")) is None
    assert weights.group(4, ("gate_proj", "up_proj")) is not None


def test_nothing_is_padded() -> None:
    weights = packed(make_raw({(0, "q_proj"): 1, (1, "q_proj"): 7}), torch.bfloat16)
    assert weights.num_bytes == (1 + 7) * (8 + 6) * 2


def test_scaling_is_multiplied_in_float32_and_rounded_once() -> None:
    raw = make_raw({(0, "q_proj"): 4}, torch.bfloat16)
    projection = packed(raw, torch.bfloat16).projection(0, "q_proj")
    assert projection is not None
    assert torch.equal(projection.b, (raw[(0, "q_proj")].b.float() * 1.7).bfloat16())


def test_going_to_the_device_it_is_on_copies_nothing() -> None:
    weights = packed(make_raw({(0, "q_proj"): 4}), torch.float32)
    there = weights.to(torch.device("cpu"))
    assert isinstance(there, AdapterWeights)
    assert there.flat.data_ptr() == weights.flat.data_ptr()
