from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, processors

from deployments.tokenizer.tokenizer_folder import load_tokenizer, omitted_end
from engine.errors import CheckpointError
from tests.architecture.source_tree import ROOT

CODE = """
import sys
from deployments.generation import ChatMessage, ChatPrompt
from deployments.tokenizer.text_codec import TextCodec
codec = TextCodec(sys.argv[1])
print(codec.encode_chat(ChatPrompt(messages=(ChatMessage(role="user", content="What is json.loads?"),))))
print("transformers" in sys.modules, "torch" in sys.modules)
{more}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an option that only transformers knows."""
    shutil.copytree(ROOT / "models" / "stdlib-chat", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"legacy": False}))
    return tmp_path


def run(folder: Path, *, more: str = "", first: str = "") -> tuple[list[str], str]:
    """Run in a fresh interpreter; returns what it printed, and what it complained of."""
    code = first + CODE.format(more=more)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines(), done.stderr


def test_text_is_encoded_without_torch_and_without_advice_to_install_it(folder: Path) -> None:
    more = "import torch, importlib.util\nprint(importlib.util.find_spec('torch') is not None)"
    (token_ids, modules, can_find_torch), complaints = run(folder, more=more)
    assert modules == "True False"
    assert "PyTorch" not in complaints
    assert can_find_torch == "True"
    (with_torch, modules), _ = run(folder, first="import torch\n")
    assert (with_torch, modules) == (token_ids, "True True")


@pytest.mark.parametrize("is_generic", [True, False])
def test_a_template_may_lie_in_the_file_of_a_model_that_sees(folder: Path, is_generic: bool) -> None:
    """Of some that were published by older versions of transformers no other file has it."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(str(folder)).templates == {"default": config["chat_template"]}
    left_out = {"chat_template", "legacy"} if is_generic else {"chat_template"}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in left_out}))
    assert load_tokenizer(str(folder)).templates == {"default": "{{ messages }}"}
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match="chat_template"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("told", [5, 0, True, {"default": 5}, [{"name": "default", "template": 5}], "\ud800"])
@pytest.mark.parametrize("file", ["tokenizer_config", "chat_template"])
def test_a_template_that_is_no_text_is_refused_by_its_file(folder: Path, told: object, file: str) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": None}
    path.write_text(json.dumps(config))
    other = json.loads((folder / f"{file}.json").read_text()) if (folder / f"{file}.json").is_file() else {}
    (folder / f"{file}.json").write_text(json.dumps(other | {"chat_template": told}))
    with pytest.raises(CheckpointError, match=rf"{file}.json: chat_template"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("told", [[], None, {"added_tokens_decoder": 5}, {"tokenizer_class": ["a"]}])
def test_settings_of_another_type_are_refused(folder: Path, told: object) -> None:
    """They ended a check in a traceback from within transformers."""
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json(: must hold a JSON object| has another type than expected)"
    ):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("told", "template", "end"),
    [
        ({"add_eos_token": True}, "<s> $A", 2),
        ({"add_eos_token": True, "tokenizer_class": "LlamaTokenizerFast"}, "<s> $A", 2),
        ({"add_eos_token": True, "bos_token": "</s>"}, "</s> $A", 2),
        ({"add_eos_token": True}, "<s> $A </s>", None),
        ({"add_eos_token": False}, "<s> $A", None),
        ({}, "<s> $A", None),
        # A class that transformers never had do it.
        ({"add_eos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, "<s> $A", None),
    ],
)
def test_an_end_that_one_file_adds_and_another_omits_is_known(
    told: dict[str, object], template: str, end: int | None, tmp_path: Path
) -> None:
    """The last token of a text, whose state is the vector of e5-mistral, was not the one that it was trained to be."""
    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.BPE(special | {"\u2581": 3, "a": 4}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.add_special_tokens(list(special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | told))
    assert omitted_end(str(tmp_path), load_tokenizer(str(tmp_path))) == end


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """A classifier saved without its tokenizer read every word as the unknown token, and judged nothing."""
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: the tokenizer has no vocabulary"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n")
    assert load_tokenizer(str(tmp_path)).backend.encode("hello").tokens == ["[CLS]", "hello", "[SEP]"]
