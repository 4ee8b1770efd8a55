from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from adapters.errors import AdapterError, NoBaseTensorError
from adapters.experts import Stack
from adapters.loading import AdapterLoader, BaseTensors, unstack
from adapters.registry import reference
from adapters.weights import AdapterWeights
from tests.adapters.handmade import SHAPES, VOCAB, make_config, make_tensors, opens, write


def no_base(name: str) -> torch.Tensor:
    raise AssertionError(f"plain LoRA does not depend on the base's {name}")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> object:
    return AdapterLoader(SHAPES, 64, dtype, opens(no_base)).load(reference("demo", str(folder)))


def test_an_adapter_loads_with_its_scaling_in_b(tmp_path: Path) -> None:
    write(tmp_path, make_config(lora_alpha=2))
    weights = AdapterLoader(SHAPES, 64, torch.float32, opens(no_base)).load(reference("demo", str(tmp_path)))
    projection = weights.projection(1, "q_proj")
    assert projection is not None
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    assert torch.equal(projection.a, make_tensors()[f"{prefix}.lora_A.weight"])
    assert torch.equal(projection.b, make_tensors()[f"{prefix}.lora_B.weight"] * 0.5)
    assert weights.projection(1, "v_proj") is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused_naming_the_tensor(tmp_path: Path, value: float) -> None:
    tensors = make_tensors()
    name = next(iter(tensors))
    tensors[name][1, 2] = value
    write(tmp_path, tensors=tensors)
    with pytest.raises(AdapterError, match=r"lora_A.* holds NaN or infinity"):
        load(tmp_path)


def test_numbers_that_overflow_in_the_engines_dtype_are_refused(tmp_path: Path) -> None:
    tensors = {key: value * 3e4 for key, value in make_tensors().items()}
    write(tmp_path, make_config(lora_alpha=64), tensors)
    with pytest.raises(AdapterError, match="overflow in float16"):
        load(tmp_path, torch.float16)


def test_files_that_changed_after_the_declaration_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    ref = reference("demo", str(tmp_path))
    write(tmp_path, tensors=make_tensors(seed=1))
    with pytest.raises(AdapterError, match="have been overwritten"):
        AdapterLoader(SHAPES, 64, torch.float32, opens(no_base)).load(ref)


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def test_magnitudes_and_biases_are_measured_by_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(16, 16), torch.randn(16)
    magnitude, own_bias = torch.rand(16) + 0.5, torch.randn(16)
    tensors = make_tensors()
    for layer in range(2):
        tensors[f"{PREFIX.replace('layers.0', f'layers.{layer}')}.lora_magnitude_vector"] = magnitude.clone()
    tensors[f"{PREFIX}.base_layer.bias"] = own_bias
    write(tmp_path, make_config(use_dora=True, bias="all"), tensors)
    base = {"weight": weight, "bias": bias}
    ref = reference("demo", str(tmp_path))
    weights = AdapterLoader(SHAPES, 64, torch.float32, opens(lambda name: base[name.rpartition(".")[2]])).load(ref)
    a, b = tensors[f"{PREFIX}.lora_A.weight"], tensors[f"{PREFIX}.lora_B.weight"]
    gain = magnitude / (weight + 2 * b @ a).norm(dim=1)
    columns, projection = weights.extras.columns[(0, "q_proj")], weights.projection(0, "q_proj")
    assert projection is not None
    torch.testing.assert_close(columns.gain, gain)
    torch.testing.assert_close(columns.shift, own_bias - gain * bias)
    torch.testing.assert_close(projection.b, 2 * gain[:, None] * b)
    assert not weights.changes_whole_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_classifier_is_kept_in_float32_and_changes_nothing_of_the_base(tmp_path: Path, dtype: torch.dtype) -> None:
    head = torch.randn(3, 16)
    tensors = make_tensors() | {"base_model.model.score.weight": head}
    write(tmp_path, make_config(task_type="SEQ_CLS", modules_to_save=["classifier", "score"]), tensors)
    ref = reference("demo", str(tmp_path))
    weights = AdapterLoader(SHAPES, 64, dtype, opens(no_base)).load(ref)
    assert ref.num_labels == 3
    assert weights.extras.head is not None
    assert torch.equal(weights.extras.head, head)
    assert not weights.changes_whole_model
    write(tmp_path / "plain")
    plain = AdapterLoader(SHAPES, 64, dtype, opens(no_base)).load(reference("demo", str(tmp_path / "plain")))
    assert weights.num_bytes == plain.num_bytes + head.nbytes
    head[1, 2] = torch.nan
    write(tmp_path, make_config(task_type="SEQ_CLS", modules_to_save=["score"]), tensors)
    with pytest.raises(AdapterError, match=r"score\.weight' holds NaN"):
        load(tmp_path)


def test_the_base_is_opened_once_for_each_load_and_closed_after_it(tmp_path: Path) -> None:
    is_open = []

    @contextmanager
    def open_base() -> Iterator[BaseTensors]:
        is_open.append(True)
        yield lambda _: torch.ones(16, 16)
        is_open[-1] = False

    tensors = make_tensors()
    for layer in range(2):
        tensors[f"{PREFIX.replace('layers.0', f'layers.{layer}')}.lora_magnitude_vector"] = torch.ones(16)
    write(tmp_path, make_config(use_dora=True), tensors)
    loader = AdapterLoader(SHAPES, 64, torch.float32, open_base)
    for _ in range(2):
        loader.load(reference("demo", str(tmp_path)))
    assert is_open == [False, False]


def test_an_embedding_of_another_base_is_refused(tmp_path: Path) -> None:
    added = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, VOCAB),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(16, 4),
        "base_model.model.model.embed_tokens.base_layer.weight": torch.ones(VOCAB, 16),
    }
    write(tmp_path, make_config(target_modules=["q_proj", "embed_tokens"]), make_tensors() | added)
    ref = reference("demo", str(tmp_path))
    weights = AdapterLoader(SHAPES, 64, torch.float32, opens(lambda _: torch.ones(VOCAB, 16))).load(ref)
    assert weights.changes_whole_model
    with pytest.raises(AdapterError, match=r"embed_tokens .* not that of the base"):
        AdapterLoader(SHAPES, 64, torch.float32, opens(lambda _: torch.zeros(VOCAB, 16))).load(ref)


AT = {"embed_tokens": "base_model.model.model.embed_tokens", "lm_head": "base_model.model.lm_head"}
OLD = torch.full((VOCAB, 16), 0.1)


def rows_of(end: str) -> torch.Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(len(end)))


def load_rows(
    folder: Path, tokens: object, saved: Iterable[str], *, is_tied: bool, added: dict[str, torch.Tensor] | None = None
) -> AdapterWeights:
    tensors = {f"{AT[end]}.token_adapter.trainable_tokens_delta": rows_of(end) for end in saved}
    config = make_config(trainable_token_indices=tokens, modules_to_save=["lm_head"] if added else None)
    ref = reference("demo", write(folder, config, make_tensors() | tensors | (added or {})))
    return AdapterLoader(SHAPES, 64, torch.float32, opens(lambda _: OLD), is_tied=is_tied).load(ref)


@pytest.mark.parametrize(
    ("is_tied", "tokens", "changed"),
    [
        (False, [9, 4], {"embed_tokens": "embed_tokens"}),
        (True, [9, 4], {"embed_tokens": "embed_tokens", "lm_head": "embed_tokens"}),
        (
            True,
            {"embed_tokens": [9, 4], "lm_head": [9, 4]},
            {"embed_tokens": "embed_tokens", "lm_head": "embed_tokens"},
        ),
        (True, {"embed_tokens": [9, 4], "lm_head": [0, 31]}, {"embed_tokens": "embed_tokens", "lm_head": "lm_head"}),
        (True, {"lm_head": [9, 4]}, {"lm_head": "lm_head"}),
    ],
)
def test_rows_of_tokens_replace_those_of_the_embedding_and_of_an_output_matrix_that_is_tied_to_it(
    tmp_path: Path, is_tied: bool, tokens: list[int] | dict[str, list[int]], changed: dict[str, str]
) -> None:
    """`changed` tells whose rows each of the two gets."""
    weights = load_rows(tmp_path, tokens, set(changed.values()), is_tied=is_tied)
    assert weights.changes_whole_model
    for end in AT:
        projection = weights.projection(-1, end)
        assert (projection is not None) == (end in changed)
        if projection is not None:
            product, expected = projection.b @ projection.a, OLD.clone()
            expected[tokens[end] if isinstance(tokens, dict) else tokens] = rows_of(changed[end])
            torch.testing.assert_close(OLD + (product.T if end == "embed_tokens" else product), expected)


def test_rows_that_do_not_fit_how_the_base_ties_its_ends_are_refused(tmp_path: Path) -> None:
    tokens, head = [9, 4], {"base_model.model.lm_head.weight": torch.ones(VOCAB, 16)}
    assert load_rows(tmp_path, tokens, ["embed_tokens"], is_tied=False, added=head).extras.matrices
    with pytest.raises(AdapterError, match="to which the lm_head that it adapts is tied"):
        load_rows(tmp_path, tokens, ["embed_tokens"], is_tied=True, added=head)
    with pytest.raises(AdapterError, match="the two are not tied"):
        load_rows(tmp_path, dict.fromkeys(AT, tokens), ["embed_tokens"], is_tied=False)


def test_what_it_depends_on_and_the_checkpoint_has_not_is_named(tmp_path: Path) -> None:
    """A model computed by transformers may have other names for its modules than its checkpoint has."""

    def base(name: str) -> torch.Tensor:
        raise NoBaseTensorError(name)

    write(tmp_path, make_config(bias="all"), make_tensors() | {f"{PREFIX}.base_layer.bias": torch.ones(16)})
    with pytest.raises(AdapterError, match=r"'demo' .* depends on model.layers.0.self_attn.q_proj.bias"):
        AdapterLoader(SHAPES, 64, torch.float32, opens(base)).load(reference("demo", str(tmp_path)))


def test_a_norm_that_is_zero_in_the_base_cannot_be_scaled(tmp_path: Path) -> None:
    tensors = make_tensors() | {"base_model.model.model.norm.weight": torch.ones(16)}
    write(tmp_path, make_config(modules_to_save=["model.norm"]), tensors)
    with pytest.raises(AdapterError, match="norms of length 0"):
        AdapterLoader(SHAPES, 64, torch.float32, opens(lambda _: torch.zeros(16))).load(
            reference("demo", str(tmp_path))
        )


def test_weights_of_a_norm_that_are_zero_in_the_base_and_stay_zero_change_nothing(tmp_path: Path) -> None:
    """They were 0 / 0: an adapter that only brought its norms along was refused."""
    old = torch.arange(16.0) - 3
    own = torch.where(old > 5, 2 * old, old)
    tensors = make_tensors() | {"base_model.model.model.norm.weight": own}
    write(tmp_path, make_config(modules_to_save=["model.norm"]), tensors)
    weights = AdapterLoader(SHAPES, 128, torch.float32, opens(lambda _: old)).load(reference("a", str(tmp_path)))
    assert torch.equal(weights.extras.columns[-1, "norm"].gain, torch.where(old > 5, 2.0, 1.0))


def test_adapters_of_one_recipe_are_checked_each_for_itself(tmp_path: Path) -> None:
    """What follows from configuration and header is known after the first; numbers, digest and name are its own."""
    loader = AdapterLoader(SHAPES, 64, torch.float32, opens(no_base))
    refs = []
    for seed in range(3):
        refs.append(reference(f"a{seed}", write(tmp_path / str(seed), tensors=make_tensors(seed=seed))))
        projection = loader.load(refs[-1]).projection(0, "q_proj")
        assert projection is not None
        assert torch.equal(projection.a, make_tensors(seed=seed)[f"{PREFIX}.lora_A.weight"])
    write(tmp_path / "2", tensors=make_tensors(seed=3))
    with pytest.raises(AdapterError, match=r"'a2'.* have been overwritten"):
        loader.load(refs[2])
    write(tmp_path / "1", make_config(lora_alpha=9), make_tensors(seed=1))
    with pytest.raises(AdapterError, match=r"'a1'.* have been overwritten"):
        loader.load(refs[1])
    (tmp_path / "0" / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(AdapterError, match=r"'a0'.* truncated"):
        loader.load(refs[0])


NUM_EXPERTS, RANK, IN, OUT = 3, 2, 5, 8


@pytest.mark.parametrize("swapped", [False, True])
def test_the_change_of_each_expert_is_what_peft_defines(swapped: bool) -> None:
    """By the two formulas of `ParamWrapper.get_delta_weight`, 0.21's and that of 0.18 for [experts, out, in]."""
    torch.manual_seed(0)
    width, height = (OUT, IN) if swapped else (IN, OUT)
    a, b = torch.randn(NUM_EXPERTS * RANK, width), torch.randn(height, RANK * NUM_EXPERTS)
    by_expert, by_rank = a.reshape(NUM_EXPERTS, -1, width), b.reshape(height, -1, NUM_EXPERTS)
    formula = "o r e, e r i -> e i o" if swapped else "o r e, e r i -> e o i"
    own_a, own_b = unstack(a, b, Stack(NUM_EXPERTS, is_paired=False, is_swapped=swapped))
    assert own_a.shape == (NUM_EXPERTS, RANK, IN)
    assert own_b.shape == (NUM_EXPERTS, OUT, RANK)
    assert own_a.is_contiguous()
    assert own_b.is_contiguous()
    torch.testing.assert_close(own_b @ own_a, torch.einsum(formula, by_rank, by_expert))


def test_outputs_that_stand_in_turn_come_one_below_the_other() -> None:
    a, b = torch.randn(NUM_EXPERTS * RANK, IN), torch.randn(OUT, RANK * NUM_EXPERTS)
    _, plain = unstack(a, b, Stack(NUM_EXPERTS, is_paired=False, is_swapped=False))
    _, paired = unstack(a, b, Stack(NUM_EXPERTS, is_paired=True, is_swapped=False))
    assert torch.equal(paired, torch.cat((plain[:, ::2], plain[:, 1::2]), dim=1))
