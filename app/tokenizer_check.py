"""Checks the tokenizers of a configuration's models, apart from `app.resolved`, which checks everything else.

A tokenizer may import transformers without torch, and then no model or classifier of this process can be computed by
transformers any more. Tokenizers are therefore checked after all other parts of all applications.
"""

from __future__ import annotations

from app.checkpoint_source import is_hub_id, local_folder
from app.places import at
from app.settings import ModelSettings, Settings
from deployments.tokenizer.text_codec import TextCodec
from engine.errors import ConfigError


def tokenizer_mistakes(settings: Settings) -> list[str]:
    """Return what is wrong with the tokenizers of models that need not be downloaded, at most one mistake per model."""
    found = []
    for index, model in enumerate(settings.models):
        if any(map(is_hub_id, model.sources().values())):
            continue
        try:
            _check(model, f"models[{index}]")
        except ConfigError as error:
            found.append(str(error))
    return found


def _check(model: ModelSettings, place: str) -> None:
    with at(f"{place}.{'path' if model.tokenizer_path is None else 'tokenizer_path'}"):
        TextCodec(str(local_folder(model.tokenizer_path or model.path)))
