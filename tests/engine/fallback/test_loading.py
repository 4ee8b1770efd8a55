"""A checkpoint that transformers computes: whole or refused, and refused where our attention is not its own."""

from __future__ import annotations

import gc
from pathlib import Path
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cpu.called_backend import CalledBackend
from engine.errors import CheckpointError
from engine.fallback import loading
from engine.fallback.decoder import FallbackDecoder
from kernels import native
from kernels.program import Pool
from tests.engine.fallback.saved import load, save


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    held = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path, {"format": "pt"})


def test_a_whole_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert load(save(tmp_path)).spec.architecture == "SeedOssForCausalLM"


def test_a_missing_a_left_over_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    norm = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    for tensor, words in ((None, "missing keys: model.norm.weight"), (torch.ones(5), "mismatched keys.*norm")):
        change(tmp_path, **{"model.norm.weight": tensor})
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path)
    change(tmp_path, **{"model.norm.weight": norm, "model.layers.7.extra": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.layers\.7\.extra"):
        load(tmp_path)


def test_a_layer_that_drafts_is_passed_over(tmp_path: Path) -> None:
    """A pruned DeepSeek V3 or GLM with its own was refused; a plain layer beyond the last still is."""
    layer = {"model.layers.2.enorm.weight": torch.ones(32), "model.layers.2.mlp.down_proj.weight": torch.ones(32, 48)}
    change(save(tmp_path), **layer)
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.layers\.2\.enorm\.weight \(2 in all\)"):
        load(tmp_path)
    change(tmp_path, **{"model.layers.2.eh_proj.weight": torch.ones(32, 64)})
    assert load(tmp_path).spec.num_layers == 2
    change(tmp_path, **{"model.layers.1.eh_proj.weight": torch.ones(32, 64)})
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.layers\.1\.eh_proj\.weight \(1 in all\)"):
        load(tmp_path)


def test_a_truncated_file_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        load(tmp_path)


def test_a_model_whose_trial_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FallbackDecoder, *parts: object, **options: object) -> None:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(FallbackDecoder, "attend", fail)
    with pytest.raises(CheckpointError, match=r"SeedOssForCausalLM is not served: a trial run failed: sizes differ"):
        load(save(tmp_path))


def test_attention_that_gives_other_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = FallbackDecoder.attend

    def shifted(self: FallbackDecoder, *parts: object, **options: object) -> tuple[torch.Tensor, None]:
        out, _ = attend(self, *parts, **options)  # type: ignore[arg-type]
        return out.roll(1, dims=-1), None

    monkeypatch.setattr(FallbackDecoder, "attend", shifted)
    with pytest.raises(CheckpointError, match="its logits differ by"):
        load(save(tmp_path))


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_share_no_memory_with_files(tmp_path: Path, is_tied: bool) -> None:
    model = load(save(tmp_path, tie_word_embeddings=is_tied, attention_bias=True))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert model.spec.is_tied is is_tied


def test_a_model_that_nobody_uses_any_more_is_forgotten(tmp_path: Path) -> None:
    model = ref(load(save(tmp_path)))
    gc.collect()
    assert model() is None


@pytest.mark.parametrize(("is_tied", "has_head"), [(True, False), (True, True), (False, True)])
def test_output_matrix_and_embedding_are_held_once_and_as_they_are(
    tmp_path: Path, is_tied: bool, has_head: bool
) -> None:
    folder = save(tmp_path, head_dim=16, tie_word_embeddings=is_tied)
    kernels = native.load()
    if kernels is None:
        pytest.skip("no C++ compiler")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding
    if has_head:
        head = torch.randn(embedding.shape)
        change(folder, **{"lm_head.weight": head})
    decoder = load(folder, backend=CalledBackend(Pool(kernels, 1), torch.float32))
    model, spec = decoder._model, decoder.spec
    assert model is not None
    assert model.lm_head.weight.numel() == model.model.embed_tokens.weight.numel() == 0
    ids, h = torch.tensor([[7, 59, 0]]), torch.randn(3, spec.hidden_size)
    assert torch.equal(model.model.embed_tokens(ids), embedding[ids])
    torch.testing.assert_close(model.lm_head(h), h @ head.T, atol=1e-5, rtol=1e-4)


def test_a_model_may_be_off_by_what_rounding_alone_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of Gemma 4's shape were refused: rounding embeddings otherwise changes logits there by 60%."""
    monkeypatch.setattr(loading, "MAX_ERROR", 0.0)
    assert load(save(tmp_path), torch.bfloat16).spec.architecture == "SeedOssForCausalLM"
    monkeypatch.setattr(loading, "MAX_ROUNDINGS", 0.0)
    with pytest.raises(CheckpointError, match="its logits differ"):
        load(tmp_path, torch.bfloat16)
