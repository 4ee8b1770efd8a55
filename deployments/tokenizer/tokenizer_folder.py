"""The tokenizer of a checkpoint's folder: read directly, or by transformers where only that knows the class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.tokenizer.generic_tokenizer import read_generic
from deployments.tokenizer.light_transformers import auto_tokenizer
from deployments.tokenizer.loaded_tokenizer import LoadedTokenizer
from engine.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str) -> LoadedTokenizer:
    """Return the tokenizer of a checkpoint.

    Raises:
        CheckpointError: there is none, or none that works without Python code.
    """
    found = read_generic(folder)
    return _by_transformers(folder) if found is None else found


def _by_transformers(folder: str) -> LoadedTokenizer:
    try:
        tokenizer: PreTrainedTokenizerBase = auto_tokenizer().from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, use_fast=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        # Of several lines only the last would be told as the reason why a server ends.
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"{folder}: transformers has no fast tokenizer for this checkpoint")
    templates = tokenizer.chat_template or {}
    return LoadedTokenizer(
        backend=tokenizer.backend_tokenizer,
        templates=templates if isinstance(templates, dict) else {"default": templates},
        special_tokens=tokenizer.special_tokens_map,
        max_tokens=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        pad_type_id=tokenizer.pad_token_type_id,
        input_names=tuple(tokenizer.model_input_names),
    )
