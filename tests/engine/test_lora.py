from __future__ import annotations

import pytest
import torch

from adapters.identity import AdapterDigest
from adapters.weights import AdapterWeights, RawProjection
from engine.backend import Backend
from engine.lora import LinearProducts, LoraBatch, collect_segments
from tests.adapters.handmade import packed

QKV = ("q_proj", "k_proj", "v_proj")
SPLITS = (8, 4, 4)
A, B, C = (AdapterDigest(letter) for letter in "abc")


class Resident:
    """Adapters of different ranks and targets, and how often they were asked for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.raw = {
            A: self._raw({"q_proj": 2, "v_proj": 5}),
            B: self._raw({"k_proj": 3, "o_proj": 1}),
            C: self._raw({"q_proj": 1, "k_proj": 2, "v_proj": 3}),
        }
        self.asked: list[AdapterDigest] = []

    @staticmethod
    def _raw(ranks: dict[str, int]) -> dict[tuple[int, str], RawProjection]:
        width = dict(zip(QKV, SPLITS, strict=True)) | {"o_proj": 8}
        return {
            (1, module): RawProjection(a=torch.randn(rank, 8), b=torch.randn(width[module], rank), scaling=0.5)
            for module, rank in ranks.items()
        }

    def weights(self, digest: AdapterDigest) -> AdapterWeights:
        self.asked.append(digest)
        return packed(self.raw[digest], torch.float32)

    def delta(self, digest: AdapterDigest | None, module: str, x: torch.Tensor, width: int) -> torch.Tensor:
        item = None if digest is None else self.raw[digest].get((1, module))
        return torch.zeros(len(x), width) if item is None else 0.5 * x @ item.a.T @ item.b.T


def build(pool: Resident, *segments: tuple[AdapterDigest | None, int, int]) -> LoraBatch:
    return LoraBatch(collect_segments(segments, pool.weights))


def added(batch: LinearProducts, layer: int, modules: tuple[str, ...], x: torch.Tensor, *splits: int) -> torch.Tensor:
    """What is added to a product of nothing."""
    return batch.multiply(lambda _: torch.zeros(len(x), sum(splits)), x, layer, modules, splits)


SEGMENTS = ((None, 0, 3), (A, 3, 4), (A, 4, 6), (B, 6, 9), (C, 9, 10), (None, 10, 12))


@pytest.mark.parametrize(("start", "end"), [(0, 12), (0, 3), (4, 8), (5, 6), (9, 12), (11, 12)])
def test_some_tokens_alone_get_what_they_get_among_all(start: int, end: int) -> None:
    batch, x = build(Resident(), *SEGMENTS), torch.randn(12, 8)
    expected = added(batch, 1, QKV, x, *SPLITS)[start:end]
    found = added(batch.of_tokens(start, end), 1, QKV, x[start:end], *SPLITS)
    torch.testing.assert_close(found, expected)


def test_each_token_gets_the_delta_of_its_own_adapter_and_base_tokens_none() -> None:
    pool = Resident()
    batch = build(pool, *SEGMENTS)
    x, y = torch.randn(12, 8), torch.randn(12, 16)
    expected = y.clone()
    for digest, start, end in SEGMENTS:
        parts = [pool.delta(digest, m, x[start:end], width) for m, width in zip(QKV, SPLITS, strict=True)]
        expected[start:end] += torch.cat(parts, dim=1)
    base_before = y[:3].clone()
    assert batch.multiply(lambda _: y, x, 1, QKV, SPLITS) is y
    torch.testing.assert_close(y, expected)
    assert torch.equal(y[:3], base_before)


@pytest.mark.parametrize("module", ["q_proj", "k_proj", "o_proj"])
def test_a_single_module_equals_the_formula(module: str) -> None:
    pool = Resident()
    x = torch.randn(12, 8)
    y = added(build(pool, *SEGMENTS), 1, (module,), x, 4 if module == "k_proj" else 8)
    expected = torch.cat([pool.delta(d, module, x[start:end], y.shape[1]) for d, start, end in SEGMENTS])
    torch.testing.assert_close(y, expected)


def test_a_batch_without_adapters_has_no_lora_at_all() -> None:
    pool = Resident()
    assert collect_segments([(None, 0, 5), (A, 5, 5)], pool.weights) == ()
    assert pool.asked == []
    assert Backend().lora(()) is None


def test_neighbouring_rows_of_one_adapter_are_one_segment() -> None:
    pool = Resident()
    build(pool, (A, 0, 1), (A, 1, 2), (None, 2, 3), (A, 3, 4))
    assert pool.asked == [A, A]


def test_a_module_or_layer_that_nobody_targets_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(**_: object) -> None:
        raise AssertionError("a product was computed")

    monkeypatch.setattr("engine.lora.lora_shrink", forbidden)
    batch = build(Resident(), *SEGMENTS)
    x = torch.randn(12, 8)
    assert not added(batch, 1, ("down_proj",), x, 8).any()
    assert not added(batch, 0, ("q_proj",), x, 8).any()
    assert not added(batch, 0, QKV, x, *SPLITS).any()
    assert not added(batch, 1, ("gate_proj", "up_proj"), x, 4, 4).any()


def test_an_adapter_alone_gets_what_it_gets_in_a_crowd() -> None:
    pool = Resident()
    x = torch.randn(12, 8)
    crowd = added(build(pool, *SEGMENTS), 1, QKV, x, *SPLITS)
    alone = added(build(pool, (B, 0, 3)), 1, QKV, x[6:9].clone(), *SPLITS)
    torch.testing.assert_close(crowd[6:9], alone)
