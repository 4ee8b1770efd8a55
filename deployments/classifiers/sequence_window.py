"""Reads what the files of a sequence-classification checkpoint say of it. Does not need torch."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from pathlib import Path

from deployments.config import SafetyConfig
from deployments.tokenizer.tokenizer_folder import read_tokenizer_config
from engine.decoder.fields import Fields
from engine.decoder.json_file import read_json
from engine.errors import CheckpointError, ConfigError
from engine.loading.weight_files import open_whole, weight_files

OFFSET_POSITION_TYPES = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Model types whose position ids begin after the padding token's id."""
OFFSET_PAD_ID = 1
"""The padding token's id of all these types, if config.json has none."""
CHARS_PER_TOKEN = 8
"""More than texts have, so that a text which fits a window is not cut into pieces."""
DEFAULT_WINDOW_TOKENS = 512
DEFAULT_NUM_LABELS = 2
"""transformers' default for a config.json without labels."""
HEADS = frozenset({"classification_head", "classifier", "logits_proj", "score", "sequence_summary"})
"""Modules that transformers' classes for sequence classification put on an encoder; each has one of them."""
PROBABLE = ("single_label_classification", "multi_label_classification")
"""Values of problem_type whose logits are turned into probabilities."""


def window_of(model_type: str, positions: int | None, pad_id: int | None, tokenizer_bound: float) -> int:
    """Return the maximum tokens per row, given a model's positions and its tokenizer's bound."""
    # XLNet, whose positions have no bound, has -1.
    bound = positions if positions is not None and positions > 0 else DEFAULT_WINDOW_TOKENS
    if model_type in OFFSET_POSITION_TYPES:
        bound -= (OFFSET_PAD_ID if pad_id is None else pad_id) + 1
    # A tokenizer without a bound has 10^30.
    return int(min(bound, tokenizer_bound))


def read_window(folder: str) -> int:
    """Return the window of a checkpoint from its files alone.

    Raises:
        CheckpointError: config.json or tokenizer_config.json cannot be read, or a field of theirs is wrong.
    """
    fields = _fields(folder)
    return window_of(
        str(fields.config.get("model_type")),
        fields.count("max_position_embeddings", DEFAULT_WINDOW_TOKENS, least=-1),
        fields.count("pad_token_id", OFFSET_PAD_ID, least=-1),
        _tokenizer_bound(folder),
    )


def _fields(folder: str) -> Fields:
    path = Path(folder) / "config.json"
    return Fields(read_json(path), str(path))


def _tokenizer_bound(folder: str) -> float:
    bound = read_tokenizer_config(folder).get("model_max_length") or inf
    if isinstance(bound, bool) or not isinstance(bound, int | float) or bound < 1:
        path = Path(folder) / "tokenizer_config.json"
        raise CheckpointError(f"{path}: model_max_length must be a number of at least 1, it is {bound!r}.")
    return bound


def read_labels(folder: str) -> tuple[str, ...]:
    """Return the labels of a checkpoint, by transformers' names if it has none. Errors as in `read_window`."""
    return labels_of(_fields(folder))


def labels_of(fields: Fields) -> tuple[str, ...]:
    """Return the labels that a config.json names, in order. Otherwise as `read_labels`."""
    told = fields.config.get("id2label")
    if told is None:
        return tuple(f"LABEL_{index}" for index in range(fields.count("num_labels", DEFAULT_NUM_LABELS)))
    if not isinstance(told, dict) or not told or told.keys() != {str(index) for index in range(len(told))}:
        raise CheckpointError(f"{fields.where}: id2label must name a label for each number from 0, it is {told!r}.")
    return tuple(str(told[str(index)]) for index in range(len(told)))


def check_head(folder: str) -> None:
    """Check by the files' headers that a checkpoint is complete and has a classification head.

    Raises:
        CheckpointError: it has none, or a file is missing or cut off.
    """
    modules: set[str] = set()
    for path in weight_files(Path(folder)):
        with open_whole(path, framework="numpy") as tensors:
            modules.update(*(name.split(".") for name in tensors.keys()))  # noqa: SIM118 - not a mapping
    if HEADS.isdisjoint(modules):
        raise CheckpointError(f"{folder}: not a classifier's checkpoint: it has no classification head.")


def check_problem(folder: str) -> None:
    """Check that a checkpoint was trained to give probabilities. Errors also as in `read_window`.

    Raises:
        CheckpointError: it was trained for numbers of any size, which no threshold fits, or for an unknown problem.
    """
    fields = _fields(folder)
    problem = fields.config.get("problem_type")
    if problem is not None and problem not in PROBABLE:
        raise CheckpointError(
            f"{fields.where}: problem_type is {problem!r}; a classifier has probabilities: {' or '.join(PROBABLE)}."
        )


def check_labels(config: SafetyConfig, labels: Collection[str]) -> None:
    """Check the labels that a classifier's configuration names.

    Raises:
        ConfigError: the classifier has no such label.
    """
    named = {"benign_labels": config.benign_labels, "threshold_by_hazard": tuple(config.threshold_by_hazard)}
    for field, names in named.items():
        unknown = [name for name in names if name not in labels]
        if unknown:
            raise ConfigError(
                f"args.safety.{field}: the classifier has no label {unknown[0]!r}; it has {', '.join(labels)}"
            )
