from __future__ import annotations

from dataclasses import replace

import torch

from adapters.weights import Columns, Extras, RawAdapter, RawProjection, split_modules
from tests.adapters.handmade import packed


def make_raw(
    ranks: dict[tuple[int, str], int], dtype: torch.dtype = torch.float32
) -> dict[tuple[int, str], RawProjection]:
    torch.manual_seed(0)
    return {
        key: RawProjection(a=torch.randn(rank, 8).to(dtype), b=torch.randn(6, rank).to(dtype), scaling=1.7)
        for key, rank in ranks.items()
    }


def test_each_module_keeps_its_own_rank() -> None:
    raw = make_raw({(0, "v_proj"): 3, (0, "q_proj"): 2, (0, "o_proj"): 5, (4, "up_proj"): 1})
    weights = packed(raw, torch.float32)
    for (layer, module), item in raw.items():
        projection = weights.projection(layer, module)
        assert projection is not None
        assert torch.equal(projection.a, item.a)
        torch.testing.assert_close(projection.b, item.b * 1.7)
    assert weights.projection(4, "q_proj") is None


def test_a_module_that_is_several_in_one_is_split_by_its_outputs() -> None:
    key, other = (2, "qkv_proj"), (2, "o_proj")
    gain = torch.arange(6.0)
    item = replace(make_raw({key: 3})[key], gain=gain)
    columns = {key: Columns(gain=gain, shift=-gain)}
    raw = RawAdapter(
        projections={key: item, **make_raw({other: 1})}, dtype=torch.float32, extras=Extras(columns=columns)
    )
    found = split_modules(raw, {"qkv_proj": {"q_proj": 4, "k_proj": 1, "v_proj": 1}})
    assert list(found.projections) == [(2, "q_proj"), (2, "k_proj"), (2, "v_proj"), other]
    for name, start, end in (("q_proj", 0, 4), ("k_proj", 4, 5), ("v_proj", 5, 6)):
        part, changed = found.projections[2, name], found.extras.columns[2, name]
        assert part.a is item.a
        assert torch.equal(part.b, item.b[start:end])
        assert part.gain is not None
        assert torch.equal(part.gain, gain[start:end])
        assert torch.equal(changed.shift, -gain[start:end])


def test_nothing_is_padded() -> None:
    weights = packed(make_raw({(0, "q_proj"): 1, (1, "q_proj"): 7}), torch.bfloat16)
    assert weights.num_bytes == (1 + 7) * (8 + 6) * 2


def test_scaling_is_multiplied_in_float32_and_rounded_once() -> None:
    raw = make_raw({(0, "q_proj"): 4}, torch.bfloat16)
    projection = packed(raw, torch.bfloat16).projection(0, "q_proj")
    assert projection is not None
    assert torch.equal(projection.b, (raw[(0, "q_proj")].b.float() * 1.7).bfloat16())


def test_modules_of_experts_are_told_apart() -> None:
    experts = {(1, f"experts.{n}.{name}"): n + 1 for n in (10, 2) for name in ("up_proj", "gate_proj", "gate_up_proj")}
    raw = make_raw({(1, "q_proj"): 2, **experts})
    weights = packed(raw, torch.float32)
    assert weights.has_experts
    assert not packed(make_raw({(1, "q_proj"): 2}), torch.float32).has_experts
    for key, item in raw.items():
        projection = weights.projection(*key)
        assert projection is not None
        assert torch.equal(projection.a, item.a)
    assert weights.num_bytes == sum(item.a.nbytes + item.b.nbytes for item in raw.values())
