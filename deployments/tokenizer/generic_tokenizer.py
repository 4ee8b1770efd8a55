"""Loads tokenizers of transformers' generic class without transformers: tokenizer.json plus special token names.

Importing transformers costs each process one second and 45 MiB, and its generic class (`TokenizersBackend`, formerly
`PreTrainedTokenizerFast`) adds little to the `tokenizers` library. On load, transformers 5.23

- selects the class by tokenizer_config.json, unless config.json has one of a few model types or a `model_name` that
  force a class of their own, or the folder has Mistral's format (tekken.json);
- reads tokenizer.json and adds the added and special tokens that it lacks or has with different flags, as listed in
  tokenizer_config.json or, next to an older one, in special_tokens_map.json and added_tokens.json;
- takes the padding token and the sides from tokenizer.json's padding and truncation if nothing else sets them;
- installs a template that adds nothing if there is no post-processor;
- prefers chat_template.jinja and additional_chat_templates/*.jinja to templates in tokenizer_config.json.

For a folder that needs anything beyond this, `read_generic` returns None and transformers loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from engine.decoder.json_file import read_json
from engine.errors import CheckpointError

CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
MODEL_TYPES = (None, "bert", "llama", "mistral", "modernbert", "qwen3", "smollm3")
"""The model types in config.json, if it exists, that do not override the generic class."""
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_READ = {
    "added_tokens_decoder",
    "chat_template",
    "model_input_names",
    "model_max_length",
    "padding_side",
    "truncation_side",
}
_WITHOUT_EFFECT = {
    "backend",
    "clean_up_tokenization_spaces",  # only affects transformers' own decoding
    "is_local",
    "local_files_only",
    "max_length",
    "name_or_path",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "processor_class",
    "stride",
    "tokenizer_class",
    "truncation_strategy",
}
_KNOWN = {*NAMES, *_EXTRA, *_READ, *_WITHOUT_EFFECT}
"""The keys allowed in tokenizer_config.json; the effect of any other key is unknown."""
_NO_BOUND = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer and its folder's settings, however it was loaded.

    Attributes:
        backend: owned by the caller that loaded it, who may modify it.
        templates: chat template by name ("default", "tool_use").
        special_tokens: text by name ("bos_token").
        max_tokens: 10^30 if unspecified.
        truncation_side: "left" or "right".
        pad_type_id: token type id of padding tokens.
        input_names: the fields of an encoding that the model takes as inputs.
    """

    backend: Tokenizer
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    max_tokens: float
    truncation_side: str
    pad_type_id: int
    input_names: tuple[str, ...]


def read_generic(folder: str) -> LoadedTokenizer | None:
    """Return the tokenizer that transformers' `AutoTokenizer` would load from a folder, or None if that is unknown.

    Raises:
        CheckpointError: a file holds no JSON object, or the `tokenizers` library cannot read tokenizer.json.
    """
    root = Path(folder)
    try:
        settings = _object(root / "tokenizer_config.json")
        if settings is None or not _is_generic(root, settings):
            return None
        if settings.get("extra_special_tokens") == {}:
            # Common, and equivalent to absent. A non-empty object has names that only some models know.
            del settings["extra_special_tokens"]
        templates = _templates(root, settings.get("chat_template"))
        backend = _backend(root)
        padding, truncation = backend.padding, backend.truncation
        if padding is not None:
            settings = {"pad_token": padding["pad_token"], "padding_side": padding["direction"]} | settings
        if truncation is not None:
            settings = {"truncation_side": truncation["direction"]} | settings
        if templates is None or not _names_what_is_there(root, settings, backend):
            return None
    except CheckpointError:
        raise
    except (OSError, ValueError):
        # A template cannot be read: transformers will report which one and why.
        return None
    if backend.post_processor is None:
        backend.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return _loaded(settings, backend, templates)


def _loaded(settings: Mapping[str, Any], backend: Tokenizer, templates: Mapping[str, str]) -> LoadedTokenizer | None:
    sides = [settings.get(f"{what}_side", "right") for what in ("padding", "truncation")]
    max_tokens = settings.get("model_max_length")
    input_names = settings.get("model_input_names", ["input_ids", "attention_mask"])
    are_known = all(side in ("left", "right") for side in sides) and type(max_tokens) in (int, float, type(None))
    if not are_known or not isinstance(input_names, list) or not all(isinstance(name, str) for name in input_names):
        return None
    return LoadedTokenizer(
        backend=backend,
        templates=templates,
        special_tokens={name: str(_text(settings[name])) for name in NAMES if settings.get(name) is not None},
        max_tokens=_NO_BOUND if max_tokens is None else max_tokens,
        truncation_side=sides[1],
        pad_type_id=0,
        input_names=tuple(input_names),
    )


def _is_generic(root: Path, settings: Mapping[str, Any]) -> bool:
    if not (root / "tokenizer.json").is_file() or (root / "tekken.json").exists():
        return False
    if settings.get("tokenizer_class") not in CLASSES or not settings.keys() <= _KNOWN:
        return False
    if not (root / "config.json").exists():
        return True
    model = _object(root / "config.json")
    return model is not None and model.get("model_type") in MODEL_TYPES and "model_name" not in model


def _templates(root: Path, told: object) -> dict[str, str] | None:
    """Return the chat templates by name, or None if `told` has an unknown form."""
    main = root / "chat_template.jinja"
    found = {"default": main.read_text(encoding="utf-8")} if main.is_file() else {}
    for path in (root / "additional_chat_templates").glob("*.jinja"):
        found[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if found:
        return {} if found == {"default": ""} else found
    if told is None or isinstance(told, str):
        return {"default": told} if told else {}
    if not isinstance(told, list) or not all(isinstance(entry, dict) for entry in told):
        return None
    pairs = [(entry.get("name"), entry.get("template")) for entry in told]
    return dict(pairs) if all(isinstance(text, str) for pair in pairs for text in pair) else None


def _backend(root: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(root / "tokenizer.json"))
    except Exception as error:
        # The library raises plain Exception for files that it cannot read.
        raise CheckpointError(f"{root}: the tokenizer cannot be loaded: {error}") from error


def _names_what_is_there(root: Path, settings: Mapping[str, Any], backend: Tokenizer) -> bool:
    """Whether every token named in any file is an added token of tokenizer.json, with the same id and flags."""
    held_by_id = {str(token_id): token.__getstate__() for token_id, token in backend.get_added_tokens_decoder().items()}
    held = {flags["content"]: flags for flags in held_by_id.values()}
    older = _object(root / "special_tokens_map.json") or {}
    added = settings.get("added_tokens_decoder", {})
    id_by_text = _object(root / "added_tokens.json") or {}
    return (
        all(_is_held(held, _untyped(token)) for token in _named(settings))
        and older.keys() <= {*NAMES, *_EXTRA}
        and all(_text(older[name]) == _text(settings.get(name)) for name in NAMES if name in older)
        and all(_is_held(held, token) for token in _named(older))
        and isinstance(added, dict)
        and all(_flags(token, is_special=False) == held_by_id.get(token_id) for token_id, token in added.items())
        and all(held_by_id.get(str(token_id), {}).get("content") == text for text, token_id in id_by_text.items())
    )


def _named(told: Mapping[str, Any]) -> list[object]:
    """Return the special tokens that a file names, each a text or an object; None stands for a malformed list."""
    found = [told[name] for name in NAMES if told.get(name) is not None]
    for name in _EXTRA:
        tokens = told.get(name)
        if tokens is not None:
            found += tokens if isinstance(tokens, list) else [None]
    return found


def _untyped(token: object) -> object:
    """Return a token of tokenizer_config.json without the `__type` that objects must have there, as in other files."""
    if not isinstance(token, dict):
        return token
    is_typed = token.get("__type") == "AddedToken"
    return {name: value for name, value in token.items() if name != "__type"} if is_typed else None


def _is_held(held: Mapping[str, dict[str, Any]], token: object) -> bool:
    flags = held.get(_text(token) or "")
    if flags is None or flags["special"] is not True:
        return False
    return isinstance(token, str) or _flags(token, is_special=True) == flags


def _flags(token: object, *, is_special: bool) -> dict[str, Any] | None:
    """Return the flags of a token given as an object, completed by the library's defaults; None if it is no object."""
    if not isinstance(token, dict):
        return None
    is_special = token.get("special", is_special)
    matching = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {**matching, "normalized": not is_special, "special": is_special, **token}


def _text(token: object) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _object(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
