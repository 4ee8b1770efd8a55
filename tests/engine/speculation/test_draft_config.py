from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.decoder.reading import read_spec
from engine.decoder.spec import DecoderSpec
from engine.errors import ConfigError
from engine.fallback.spec import FallbackSpec
from engine.resolve import check
from engine.speculation.draft_config import MAX_TEXTS, draft_config, resolve_draft
from tests.deployments.tiny_models import CONTEXT, write_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def spec(folder: Path) -> DecoderSpec:
    return read_spec(str(folder))


def test_it_reads_as_much_as_it_can_and_keeps_nothing(folder: Path, spec: DecoderSpec) -> None:
    config = EngineConfig(
        model_path=str(folder),
        draft_model=str(folder),
        kv_cache_bytes=1 << 30,
        kv_disk_bytes=1 << 30,
        max_num_seqs=64,
        max_prefill_tokens_with_decodes=8,
    )
    found = draft_config(config, spec, replace(spec, max_position=CONTEXT // 2))
    assert (found.model_path, found.draft_model, found.max_num_seqs) == (str(folder), None, MAX_TEXTS)
    assert (found.max_model_len, found.kv_cache_bytes, found.kv_disk_bytes) == (CONTEXT // 2, None, 0)
    assert (found.enable_prefix_cache, found.max_prefill_tokens_with_decodes) == (False, None)
    assert draft_config(replace(config, max_model_len=9, max_num_seqs=2), spec, spec).max_model_len == 9
    assert draft_config(replace(config, max_model_len=9, max_num_seqs=2), spec, spec).max_num_seqs == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"device": "cuda"}, "'cpu'; this model runs on 'cuda'"), ({"num_speculative_tokens": 0}, "would not be used")],
)
def test_what_excludes_it_is_named(folder: Path, spec: DecoderSpec, options: dict[str, object], words: str) -> None:
    config = EngineConfig(model_path=str(folder), draft_model=str(folder), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"draft_model: .*{words}"):
        draft_config(config, spec, spec)


def test_models_that_cannot_guess_or_be_guessed_for_are_refused(
    folder: Path, spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model_path=str(folder), draft_model=str(folder))
    silent = replace(spec, generates=False)
    for pair in ((silent, spec), (spec, silent)):
        with pytest.raises(ConfigError, match="only computes embeddings"):
            draft_config(config, *pair)
    monkeypatch.setattr(DecoderSpec, "state_bytes", lambda self, element_bytes: 8 * (self.max_position == 7))
    assert FallbackSpec.state_bytes is not DecoderSpec.state_bytes
    with pytest.raises(ConfigError, match="the draft model has recurrent layers"):
        draft_config(config, spec, replace(spec, max_position=7))


def test_another_tokenizer_is_refused(folder: Path, spec: DecoderSpec, tmp_path: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = EngineConfig(model_path=str(folder), draft_model=str(tmp_path))
    with pytest.raises(ConfigError, match=f"{len(vocabulary) - 2} of this model's {len(vocabulary)} tokens"):
        draft_config(config, spec, spec)
    # Without one, nothing is known of it.
    (tmp_path / "tokenizer.json").unlink()
    assert draft_config(config, spec, spec).model_path == str(tmp_path)


def test_what_is_wrong_with_it_alone_names_it(folder: Path, spec: DecoderSpec) -> None:
    config = EngineConfig(model_path=str(folder), draft_model=str(folder), quantization="fp8")
    with pytest.raises(ConfigError, match=r"^draft_model: quantization: 'fp8' is for"):
        resolve_draft(config, spec, spec, check)
