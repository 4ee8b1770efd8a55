"""Configures the engine's draft model, and refuses one that cannot continue the texts of the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from engine.config import EngineConfig
from engine.decoder.model_spec import ModelSpec
from engine.errors import ConfigError

T = TypeVar("T")

MAX_TEXTS = 8
"""Texts that are drafted at once. With more of them, steps are too full for guesses to pay off."""
MAX_READ_TOKENS = 512
TOKENIZER_FILE = "tokenizer.json"


def draft_config(config: EngineConfig, spec: ModelSpec, draft_spec: ModelSpec) -> EngineConfig:
    """Return the draft model's configuration, given both models.

    Raises:
        ConfigError: the models do not fit together, or the configuration excludes a draft model.
    """
    assert config.draft_model is not None
    _check(config, spec, draft_spec)
    max_model_len = min(config.max_model_len or spec.max_position, draft_spec.max_position)
    # What the small model has read is found by request, not by content, and blocks are taken from the stalest text.
    return replace(
        config,
        model_path=config.draft_model,
        tokenizer_path=None,
        draft_model=None,
        max_model_len=max_model_len,
        max_num_seqs=min(MAX_TEXTS, config.max_num_seqs),
        max_batched_tokens=MAX_READ_TOKENS,
        max_prefill_tokens_with_decodes=None,
        kv_cache_bytes=None,
        state_cache_bytes=None,
        kv_disk_bytes=0,
        kv_disk_folder=None,
        enable_prefix_cache=False,
        num_speculative_tokens=0,
    )


def resolve_draft(
    config: EngineConfig, spec: ModelSpec, draft_spec: ModelSpec, resolve: Callable[[EngineConfig, ModelSpec], T]
) -> T:
    """Return what `resolve` returns for the draft model; its ConfigErrors name the draft model, too."""
    own = draft_config(config, spec, draft_spec)
    try:
        return resolve(own, draft_spec)
    except ConfigError as error:
        raise ConfigError(f"draft_model: {error}") from error


def _check(config: EngineConfig, spec: ModelSpec, draft_spec: ModelSpec) -> None:
    name = f"draft_model: {config.draft_model!r}"
    if config.device == "cuda":
        raise ConfigError(f"{name} is for device 'cpu'; this model runs on 'cuda'.")
    if config.num_speculative_tokens == 0:
        raise ConfigError(f"{name}, but num_speculative_tokens is 0: it would not be used.")
    if not spec.generates or not draft_spec.generates:
        raise ConfigError(f"{name}: one of the models only computes embeddings.")
    for part, which in ((spec, "this model"), (draft_spec, "the draft model")):
        if part.state_bytes(1):
            raise ConfigError(f"{name}: {which} has recurrent layers, whose states cannot be rolled back.")
    tokens = _tokens(config.tokenizer_path or config.model_path)
    draft_tokens = _tokens(config.draft_model or "")
    if tokens is not None and draft_tokens is not None and tokens != draft_tokens:
        num_same = len(tokens.items() & draft_tokens.items())
        raise ConfigError(
            f"{name} has another tokenizer: {num_same} of this model's {len(tokens)} tokens have the same id there."
        )


def _tokens(folder: str) -> dict[str, int] | None:
    """Return the token ids by spelling, without those added later; None if there is no file that tells them."""
    try:
        vocabulary = json.loads(Path(folder, TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return vocabulary if isinstance(vocabulary, dict) else None
