"""Checks the tokenizers of a configuration's models and classifiers; `app.resolved` checks everything else.

A tokenizer may import transformers without torch, and then no model or classifier of this process can be computed by
transformers any more. Tokenizers are therefore checked after all other parts of all applications.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from app.checkpoint_source import at, is_hub_id, local_folder
from app.settings import ModelSettings, Settings
from deployments.tokenizer.text_codec import TextCodec
from deployments.tokenizer.tokenizer_folder import load_tokenizer
from engine.errors import CheckpointError, ConfigError
from engine.loading.spec import read_checkpoint_spec


def tokenizer_mistakes(settings: Settings) -> list[str]:
    """Return what is wrong with the tokenizers of parts that need not be downloaded, at most one mistake per part."""
    checks: list[Callable[[], None]] = [
        partial(_check, model, f"models[{index}]")
        for index, model in enumerate(settings.models)
        if not any(map(is_hub_id, model.sources().values()))
    ]
    classifiers = {f"rerankers[{index}].path": reranker.path for index, reranker in enumerate(settings.rerankers)}
    if settings.safety is not None:
        classifiers["safety.path"] = settings.safety.path
    checks += [partial(_check_classifier, path, place) for place, path in classifiers.items() if not is_hub_id(path)]
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return found


def _check_classifier(path: str, place: str) -> None:
    with at(place):
        load_tokenizer(str(local_folder(path)))


def _check(model: ModelSettings, place: str) -> None:
    with at(f"{place}.{'path' if model.tokenizer_path is None else 'tokenizer_path'}"):
        TextCodec(str(local_folder(model.tokenizer_path or model.path)))
        if model.tokenizer_path is not None:
            _check_ids(str(local_folder(model.tokenizer_path)), str(local_folder(model.path)))


def _check_ids(tokenizer_path: str, model_path: str) -> None:
    """Refuse a tokenizer of another model, with ids that this model lacks: prompts that contain one fail.

    Some models' own tokenizers have a few more added tokens than their vocabulary, such as those for images in Gemma's
    models for text alone. So many are accepted here, too, and any number if the model comes without a tokenizer.

    Raises:
        CheckpointError: it has such ids.
    """
    try:
        vocab_size = read_checkpoint_spec(model_path).vocab_size
    except (CheckpointError, OSError):
        # Reported where the model is checked.
        return
    largest_id = _largest_id(tokenizer_path)
    if largest_id < vocab_size:
        return
    try:
        allowed_id = max(vocab_size - 1, _largest_id(model_path))
    except (CheckpointError, OSError):
        allowed_id, largest_id = vocab_size - 1, _largest_id(tokenizer_path, with_added=False)
    if largest_id > allowed_id:
        raise CheckpointError(
            f"{tokenizer_path}: token ids up to {largest_id} do not fit a model of {vocab_size} tokens"
        )


def _largest_id(folder: str, *, with_added: bool = True) -> int:
    return max(load_tokenizer(folder).backend.get_vocab(with_added_tokens=with_added).values(), default=0)
