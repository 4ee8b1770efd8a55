"""What is read without transformers is what transformers reads; where it would not be, it is left to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
    TokenizersBackend,
)

from deployments.tokenizer.generic_tokenizer import CLASSES, MODEL_TYPES, LoadedTokenizer, read_generic
from deployments.tokenizer.tokenizer_folder import load_tokenizer
from engine.errors import CheckpointError
from tests.architecture.source_tree import ROOT
from tests.deployments.trained_tokenizers import SPECIAL, byte_level, metaspace, with_bos, word_piece

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"content": "<|user|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TYPED_USER = {"__type": "AddedToken", **USER, "special": True}
TOOL_ID = byte_level().token_to_id("<tool>")
SPELT = st.lists(
    st.sampled_from([*SPECIAL, "<tool>", "naïve tag", "<|", " ", "\n"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    max_size=6,
).map("".join)
SAMPLES = ["", " ", "Hello <s>world</s>", "<|user|> naïve tag <tool>", "Größe 日本 🙂\n\n  x", "<unk><pad>"]


def write(
    folder: Path, told: dict[str, Any] | None = None, tokenizer: Tokenizer | None = None, **files: object
) -> Path:
    """Write a folder; of the files beside, texts are templates and anything else is JSON."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED, **(told or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / (f"{name}.jinja" if isinstance(content, str) else f"{name}.json")).write_text(text)
    return folder


def assert_as_by_transformers(found: LoadedTokenizer | None, folder: Path, texts: list[str]) -> None:
    assert found is not None
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert type(theirs) is TokenizersBackend
    templates = theirs.chat_template or {}
    assert found.templates == (templates if isinstance(templates, dict) else {"default": templates})
    assert found.special_tokens == theirs.special_tokens_map
    assert found.backend.get_vocab_size(with_added_tokens=True) == len(theirs)
    assert (found.max_tokens, found.truncation_side, found.pad_type_id, found.input_names) == (
        theirs.model_max_length,
        theirs.truncation_side,
        theirs.pad_token_type_id,
        tuple(theirs.model_input_names),
    )
    # All of it, whatever text it is given.
    assert json.loads(found.backend.to_str()) == json.loads(theirs.backend_tokenizer.to_str())
    for text in texts:
        for has_special_tokens in (False, True):
            ours = found.backend.encode(text, add_special_tokens=has_special_tokens)
            assert ours.ids == theirs.backend_tokenizer.encode(text, add_special_tokens=has_special_tokens).ids


def generic_folders() -> dict[str, Callable[[Path], Path]]:
    """Folders of every form that is read directly, by name."""
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    padded = Tokenizer.from_str(byte_level().to_str())
    padded.enable_padding(pad_token="<|end|>", pad_id=4, direction="left")
    padded.enable_truncation(7, direction="left")
    decoder = {str(i): token.__getstate__() for i, token in byte_level().get_added_tokens_decoder().items()}
    told: dict[str, dict[str, Any]] = {
        "plain": {},
        "new class": {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"},
        "template": {"chat_template": "{{ messages }}"},
        "empty template": {"chat_template": ""},
        "templates": {"chat_template": templates},
        "typed token": {"bos_token": TYPED_USER, "pad_token": None},
        "extra": {"extra_special_tokens": ["<|user|>", TYPED_USER], "model_max_length": None},
        "older extra": {"additional_special_tokens": ["<|end|>"], "extra_special_tokens": {}},
        "decoder": {"added_tokens_decoder": decoder, "model_max_length": 77},
        "sides": {"padding_side": "left", "truncation_side": "left", "model_input_names": ["input_ids"]},
        "without effect": {"clean_up_tokenization_spaces": True, "max_length": 5, "stride": 1, "is_local": False},
    }
    made = {name: lambda folder, told=entry: write(folder, told) for name, entry in told.items()}
    return made | {
        "bos": lambda folder: write(folder, tokenizer=with_bos(byte_level())),
        "metaspace": lambda folder: write(folder, tokenizer=metaspace()),
        "word piece": lambda folder: write(folder, tokenizer=word_piece()),
        "padded": lambda folder: write(folder, tokenizer=padded),
        "padded otherwise": lambda folder: write(folder, {"pad_token": "</s>"}, padded),
        "file": lambda folder: write(folder, {"chat_template": "old"}, chat_template="new\n"),
        "more files": lambda folder: write_more(folder, {"chat_template": "old"}, chat_template="new"),
        "only more files": lambda folder: write_more(folder, {"chat_template": "old"}),
        "older map": lambda folder: write(
            folder, special_tokens_map={**NAMED, "eos_token": {**USER, "content": "</s>"}}
        ),
        "older list": lambda folder: write(folder, added_tokens={"<tool>": TOOL_ID}),
    }


def write_more(folder: Path, told: dict[str, Any], **files: object) -> Path:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    return write(folder, told, **files)


@pytest.mark.parametrize("name", generic_folders())
def test_a_folder_of_the_generic_class_is_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    folder = generic_folders()[name](tmp_path)
    assert_as_by_transformers(read_generic(str(folder)), folder, SAMPLES)


@pytest.mark.parametrize("model", ["stdlib-chat", "stdlib-draft", "guard"])
def test_bundled_tokenizers_are_read_as_by_transformers(model: str) -> None:
    folder = ROOT / "models" / model
    assert_as_by_transformers(read_generic(str(folder)), folder, SAMPLES)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(SPELT, max_size=20), name=st.sampled_from(["plain", "bos", "metaspace", "word piece", "decoder"]))
def test_any_text_has_the_tokens_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], name: str
) -> None:
    folder = generic_folders()[name](tmp_path_factory.mktemp("folder"))
    assert_as_by_transformers(read_generic(str(folder)), folder, texts)


TOKENS = st.sampled_from(["<s>", "<|user|>", "<tool>", "<new>", TYPED_USER, {**TYPED_USER, "rstrip": True}, USER, None])
LISTS = st.lists(TOKENS, max_size=2) | st.sampled_from([None, {}, {"image_token": "<s>"}])
DECODERS = st.dictionaries(
    st.sampled_from(["1", "3", "9999"]),
    st.sampled_from([{**USER, "special": True}, USER, {"content": "<s>"}]),
    max_size=2,
)
MAPS = st.fixed_dictionaries(
    {}, optional={"bos_token": TOKENS, "mask_token": TOKENS, "additional_special_tokens": LISTS}
)
SETTINGS = st.fixed_dictionaries(
    {"tokenizer_class": st.sampled_from(CLASSES)},
    optional={
        "bos_token": TOKENS,
        "pad_token": TOKENS,
        "extra_special_tokens": LISTS,
        "additional_special_tokens": LISTS,
        "added_tokens_decoder": DECODERS,
        "padding_side": st.sampled_from(["left", "right", None]),
        "chat_template": st.sampled_from(["", "a", None, [{"name": "tool_use", "template": "b"}]]),
        "add_bos_token": st.booleans(),
        "model_max_length": st.sampled_from([None, 7, 1e30]),
    },
)
FILES = st.fixed_dictionaries(
    {},
    optional={
        "special_tokens_map": MAPS,
        "added_tokens": st.dictionaries(st.sampled_from(["<s>", "<new>"]), st.sampled_from([1, 9999])),
        "config": st.sampled_from([{}, {"model_type": "llama"}, {"model_type": "mistral"}, {"model_type": "qwen2"}]),
        "chat_template": st.sampled_from(["", "c"]),
    },
)


@settings(max_examples=100)
@given(told=SETTINGS, files=FILES)
def test_whatever_a_folder_says_it_is_read_as_by_transformers_or_left_to_it(
    tmp_path_factory: pytest.TempPathFactory, told: dict[str, Any], files: dict[str, Any]
) -> None:
    folder = write(tmp_path_factory.mktemp("folder"), told, **files)
    found = read_generic(str(folder))
    if found is not None:
        assert_as_by_transformers(found, folder, SAMPLES)


@pytest.mark.parametrize("model_type", sorted(filter(None, MODEL_TYPES)))
def test_model_types_keep_the_generic_class(model_type: str, tmp_path: Path) -> None:
    for tokenizer_class in CLASSES:
        folder = write(tmp_path, {"tokenizer_class": tokenizer_class}, config={"model_type": model_type})
        assert_as_by_transformers(read_generic(str(folder)), folder, SAMPLES)


def test_a_model_type_that_has_a_class_of_its_own_is_not_among_them() -> None:
    own = {
        kind
        for kind in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if TOKENIZER_MAPPING_NAMES.get(kind) != "TokenizersBackend"
    }
    assert "qwen2" in own
    assert own.isdisjoint(MODEL_TYPES)


@pytest.mark.parametrize(
    "told",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
        {"tokenizer_class": []},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        *({option: True} for option in ("add_bos_token", "add_eos_token", "add_prefix_space", "fix_mistral_regex")),
        *({option: True} for option in ("legacy", "split_special_tokens", "an_option_of_tomorrow")),
        {"fast_tokenizer_files": ["tokenizer.5.0.0.json"]},
        {"post_processor": None},
        {"image_token": "<tool>"},
        {"extra_special_tokens": {"image_token": "<|user|>"}},
        {"extra_special_tokens": ["<new>"]},
        {"extra_special_tokens": ["<tool>"]},
        {"additional_special_tokens": [USER]},
        {"bos_token": "<new>"},
        {"bos_token": "<tool>"},
        {"bos_token": "a"},
        {"bos_token": USER},
        {"bos_token": {**TYPED_USER, "lstrip": True}},
        {"bos_token": 1},
        {"added_tokens_decoder": {"3": {**USER, "special": False}}},
        {"added_tokens_decoder": {"2": {**USER, "special": True}}},
        {"added_tokens_decoder": {"3": {**USER, "special": True, "lstrip": True}}},
        {"added_tokens_decoder": {"9999": {**USER, "content": "<new>"}}},
        {"added_tokens_decoder": {"3": "<|user|>"}},
        {"added_tokens_decoder": ["<|user|>"]},
        {"chat_template": 5},
        {"chat_template": ["a"]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": [{"name": [], "template": "a"}]},
        {"padding_side": "up"},
        {"model_max_length": "many"},
        {"model_input_names": "input_ids"},
    ],
)
def test_what_would_change_more_is_left_to_transformers(told: dict[str, Any], tmp_path: Path) -> None:
    assert read_generic(str(write(tmp_path, told))) is None


@pytest.mark.parametrize(
    "files",
    [
        {"special_tokens_map": {"bos_token": "</s>"}},
        {"special_tokens_map": {"pad_token": "<|end|>"}},
        {"special_tokens_map": {"bos_token": None}},
        {"special_tokens_map": {"bos_token": {**USER, "content": "<s>", "rstrip": True}}},
        {"special_tokens_map": {"additional_special_tokens": ["<new>"]}},
        {"special_tokens_map": {"chat_template": "other"}},
        {"added_tokens": {"<new>": 9999}},
        {"added_tokens": {"<tool>": 0}},
        {"config": {"model_type": "qwen2"}},
        {"config": {"model_type": "of_tomorrow"}},
        {"config": {"model_type": []}},
        {"config": {"model_type": "llama", "model_name": "phi3"}},
        {"tekken": {}},
    ],
)
def test_what_other_files_change_is_left_to_transformers(files: dict[str, Any], tmp_path: Path) -> None:
    assert read_generic(str(write(tmp_path, **files))) is None


@pytest.mark.parametrize("name", ["special_tokens_map", "config", "tokenizer_config", "added_tokens"])
def test_a_file_without_an_object_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"/{name}.json: must hold a JSON object"):
        read_generic(str(write(tmp_path, **{name: ["a"]})))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_left_to_transformers(file: str, tmp_path: Path) -> None:
    (write(tmp_path) / file).unlink()
    assert read_generic(str(tmp_path)) is None


def test_what_is_left_to_transformers_is_loaded_by_it(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokenizer_class": "TokenizersBackend", "bos_token": "<new>", "chat_template": "x"})
    assert read_generic(str(folder)) is None
    assert_as_by_transformers(load_tokenizer(str(folder)), folder, ["<new> text", *SAMPLES])


@pytest.mark.parametrize("content", ["{", "{}", '{"model": 5}'])
def test_a_broken_tokenizer_is_refused_by_its_folder(content: str, tmp_path: Path) -> None:
    (write(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


OF_ITS_OWN = {"tokenizer_class": "ATokenizer", "auto_map": {"AutoTokenizer": ["a.ATokenizer", None]}}


def test_a_class_that_a_checkpoint_brings_is_what_its_tokenizer_json_says(tmp_path: Path) -> None:
    """It was refused, unless transformers happened to have a class for the type of the model."""
    folder = write(tmp_path, OF_ITS_OWN | {"chat_template": "x"}, config={"model_type": "llama"})
    (folder / "a.py").write_text("raise SystemExit('code of a checkpoint ran')")
    found = load_tokenizer(str(folder))
    assert_as_by_transformers(found, write(tmp_path, {"chat_template": "x"}), SAMPLES)


def test_a_class_that_a_checkpoint_brings_alone_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, OF_ITS_OWN, config={"model_type": "llama"})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"custom code \(auto_map\), which is never executed: save it as"):
        load_tokenizer(str(folder))


def test_what_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded: Couldn't instantiate") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


PROBE = """
import sys
from deployments.tokenizer.text_codec import TextCodec
for folder in sys.argv[1:]:
    TextCodec(folder)
print({"transformers", "torch", "huggingface_hub"} & sys.modules.keys())
"""


def test_bundled_models_need_no_transformers(tmp_path: Path) -> None:
    """A second and 45 MiB in each process that reads a tokenizer."""
    copy = tmp_path / "with-files"
    shutil.copytree(ROOT / "models" / "stdlib-chat", copy)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    folders = ["models/stdlib-chat", "models/stdlib-draft", str(copy)]
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *folders], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "set()"
