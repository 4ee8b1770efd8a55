"""Loads the tokenizer of a checkpoint folder: directly, or with transformers if only that knows the class.

transformers is imported without torch, which text processing does not need and which would take a third of a gigabyte
in every process. transformers looks for torch once, on first import. If torch is already imported it costs nothing more
and is not hidden.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.tokenizer.generic_tokenizer import LoadedTokenizer, read_generic
from engine.decoder.json_file import read_json
from engine.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDING_CLASSES = ("CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer")
"""Tokenizers to whose texts transformers before version 5 added the tokens that tokenizer_config.json names."""


def load_tokenizer(folder: str) -> LoadedTokenizer:
    """Return the tokenizer of a checkpoint.

    Raises:
        CheckpointError: there is none, only one implemented in Python, or one with chat templates that are not text.
    """
    found = read_generic(folder)
    found = _by_transformers(folder) if found is None else found
    # Templates in files of their own are UTF-8, or were refused when they were read.
    _check_text(found.templates, Path(folder) / "tokenizer_config.json")
    return found if found.templates else replace(found, templates=_of_processor(Path(folder)))


def read_tokenizer_config(folder: str) -> dict[str, object]:
    """Return what tokenizer_config.json holds; nothing if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = Path(folder) / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def omitted_end(folder: str, loaded: LoadedTokenizer) -> int | None:
    """Return the end-of-text token that tokenizer_config.json adds to every text and tokenizer.json does not.

    Later versions of transformers follow tokenizer.json. Embedding models such as e5-mistral were trained with the
    earlier ones: the vector of a text is the hidden state of that token. None if both files agree.

    Raises:
        CheckpointError: tokenizer_config.json cannot be read.
    """
    told = read_tokenizer_config(folder)
    of_class = str(told.get("tokenizer_class")).removesuffix("Fast")
    if told.get("add_eos_token") is not True or of_class not in ENDING_CLASSES:
        return None
    end: int | None = loaded.backend.token_to_id(loaded.special_tokens.get("eos_token", ""))
    return None if loaded.backend.encode("a").ids[-1:] == [end] else end


def _check_text(templates: Mapping[str, object], path: Path) -> None:
    """Refuse templates of a JSON file that are values of another type, or have lone surrogates.

    Raises:
        CheckpointError: one of them is.
    """
    for name, template in templates.items():
        which = "" if name == "default" else f" '{name}'"
        if not isinstance(template, str):
            raise CheckpointError(f"{path}: chat_template{which} must be text, not {template!r:.64}.")
        try:
            template.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{path}: chat_template{which} has lone surrogates and is not Unicode.") from None


def _of_processor(folder: Path) -> dict[str, str]:
    """Return the chat template from chat_template.json, the separate file of older multimodal processors.

    Raises:
        CheckpointError: the file cannot be read, or its template is not text.
    """
    path = folder / "chat_template.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if template is None or template == "":
        return {}
    _check_text({"default": template}, path)
    return {"default": str(template)}


def _by_transformers(folder: str) -> LoadedTokenizer:
    try:
        tokenizer = _without_code(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # Joined: only the last line of a multi-line message would be reported as the reason for the failed start.
        reason = " ".join(str(error).split())
        if isinstance(error, AttributeError):
            reason = f"a value in tokenizer_config.json has another type than expected: {reason}"
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"{folder}: transformers has no fast tokenizer for this checkpoint")
    added = {token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
    if tokenizer.backend_tokenizer.get_vocab().keys() <= added:
        # What transformers makes of a folder without the file: every word would be an unknown token.
        raise CheckpointError(
            f"{folder}: the tokenizer has no vocabulary: save it as tokenizer.json beside the weights"
        )
    templates = {} if tokenizer.chat_template in (None, "") else tokenizer.chat_template
    return LoadedTokenizer(
        backend=tokenizer.backend_tokenizer,
        templates=templates if isinstance(templates, dict) else {"default": templates},
        special_tokens=tokenizer.special_tokens_map,
        max_tokens=tokenizer.model_max_length,
        truncation_side=tokenizer.truncation_side,
        pad_type_id=tokenizer.pad_token_type_id,
        input_names=tuple(tokenizer.model_input_names),
    )


def _without_code(folder: str) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer; for a class that the checkpoint brings (auto_map), what its tokenizer.json says.

    transformers does the same if it has another class for the model.

    Raises:
        ValueError: such a class has no tokenizer.json; and transformers' errors.
    """
    with _torch_hidden():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    found: PreTrainedTokenizerBase
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, use_fast=True)
    except ValueError:
        if "auto_map" not in read_tokenizer_config(folder):
            raise
        if not (Path(folder) / "tokenizer.json").is_file():
            raise ValueError(
                "it requires custom code (auto_map), which is never executed: save it as tokenizer.json"
            ) from None
        found = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return found


@contextmanager
def _torch_hidden() -> Iterator[None]:
    if "torch" in sys.modules:
        yield
        return
    find_spec = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" or name.startswith("torch.") else find_spec(name, package)

    importlib.util.find_spec = find_others
    # transformers would warn that torch is not installed.
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        importlib.util.find_spec = find_spec
