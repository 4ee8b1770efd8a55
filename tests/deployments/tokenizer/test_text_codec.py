"""Prompts become the tokens that transformers makes of them, and nothing typed becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deployments.generation import ChatMessage, ChatPrompt
from deployments.tokenizer.text_codec import TextCodec
from engine.errors import CheckpointError, RequestError
from tests.deployments.tiny_models import write_tokenizer
from tests.deployments.trained_tokenizers import byte_fallback_bpe, byte_level, metaspace

CONTROL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TYPED = st.lists(
    st.one_of(
        st.sampled_from([*CONTROL, "<|", "|>", "<|us", "er|>", "<", "end|>", "\ue000"]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec(str(folder), max_chars=2000)


def turns(*texts: str) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(ChatMessage(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(texts))
    )


def test_a_conversation_becomes_the_tokens_of_transformers(codec: TextCodec, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = turns("Where am I?", "Über dort, 日本 🙂.", "  And\nnow?\t")
    plain = [{"role": m.role, "content": m.content} for m in messages.messages]
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert codec.encode_chat(messages) == expected


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(texts=st.lists(TYPED, min_size=1, max_size=3))
def test_what_is_typed_is_never_a_control_token_and_is_read_as_typed(codec: TextCodec, texts: list[str]) -> None:
    token_ids = codec.encode_chat(turns(*texts))
    control = {0, 1, 2, 3, 4}
    assert [i for i in token_ids if i in control] == [
        0,
        *(token for i in range(len(texts)) for token in (4 if i % 2 else 3, 1)),
        4,
    ]
    spoken = [token_id for token_id in token_ids if token_id not in control]
    assert codec.pieces.decode(spoken) == "".join(texts)


def test_control_tokens_may_be_letters_that_begin_or_end_what_the_template_compares(tmp_path: Path) -> None:
    """Such as ChatGLM's "sop" and "eop": the last letter of "role" may be the first of one."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if note is defined %}{{ note }}{% endif %}eop"
    )
    write_tokenizer(tmp_path, marks=("eop", "reuse", "etone"), template=template)
    codec = TextCodec(str(tmp_path))
    prompt = ChatPrompt(messages=turns("Speak: eop").messages, template_options={"note": "reuse"})
    end = codec.encode_text("eop")
    token_ids = codec.encode_chat(prompt)
    assert (token_ids[0], token_ids[-1:]) == (3, end)
    assert end[0] not in token_ids[:-1]
    assert codec.pieces.decode(token_ids[1:-1]) == "Speak: eopreuse"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_raw_text_is_read_back_as_it_was(codec: TextCodec, text: str) -> None:
    assume("<|" not in text)  # nor control tokens, which hypothesis finds in our sources and raw text may have
    assert codec.pieces.decode(codec.encode_text(text)) == text


@pytest.mark.parametrize(
    ("texts", "words"),
    [(["x" * 2001], "at most 2000"), (["\ud800"], "lone surrogate")],
)
def test_a_conversation_that_cannot_be_read_is_refused_by_field(codec: TextCodec, texts: list[str], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        codec.encode_chat(turns(*texts))
    assert refused.value.field == "messages"


@pytest.mark.parametrize(("text", "words"), [("x" * 2001, "at most 2000"), ("\udfff", "lone surrogate")])
def test_raw_text_that_cannot_be_read_is_refused_by_field(codec: TextCodec, text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        codec.encode_text(text)
    assert refused.value.field == "prompt"


def with_template(folder: Path, target: Path, template: str | None) -> TextCodec:
    target.mkdir()
    (target / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    if template is not None:
        config["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(str(target))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("", "no chat template"),
    ],
)
def test_a_template_that_is_missing_or_says_no_is_a_refusal(
    folder: Path, tmp_path: Path, template: str | None, words: str
) -> None:
    codec = with_template(folder, tmp_path / "other", template)
    with pytest.raises(RequestError, match=words) as refused:
        codec.encode_chat(turns("hello"))
    assert refused.value.field == "messages"


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_of_another_form_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(CheckpointError, match=f"there is no tokenizer.json; it has {name}, which is not read"):
        TextCodec(str(tmp_path))


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_folder_without_a_whole_tokenizer_is_refused_by_name(folder: Path, tmp_path: Path, damage: str) -> None:
    if damage == "truncated":
        (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:500])
        (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        TextCodec(str(tmp_path))


@pytest.mark.parametrize("make", [byte_level, byte_fallback_bpe, metaspace])
def test_a_breaker_is_every_token_that_has_it_and_what_spells_it(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=make()).save_pretrained(tmp_path)
    codec = TextCodec(str(tmp_path))
    breakers = codec.breakers((":", "zq zq"))
    having = {token_id for token_id in make().get_vocab().values() if b":" in codec.pieces.spelling(token_id)}
    assert {word[0] for word in breakers if len(word) == 1} == having
    for text in ("x:y", "x :", ": x"):
        assert having & set(codec.encode_text(text, has_special_tokens=False))
    assert {word for word in breakers if len(word) > 1} >= set(codec.encode_word("zq zq"))


def test_a_breaker_behind_a_gap_of_ids_is_found(folder: Path, tmp_path: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary[":"] = max(vocabulary.values()) + 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    codec = TextCodec(str(tmp_path))
    assert codec.encode_text("a:b", has_special_tokens=False)[1] == vocabulary[":"]
    assert (vocabulary[":"],) in codec.breakers((":",))


def test_no_strings_are_no_breakers(codec: TextCodec) -> None:
    assert codec.breakers(()) == ()


def test_another_template_renders_with_the_same_tokens(codec: TextCodec) -> None:
    other = codec.with_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    assert other.encode_chat(turns("Where am I?")) == codec.encode_text("Where am I?<|end|>", has_special_tokens=False)
    assert other.encode_chat(turns("Where am I?")) != codec.encode_chat(turns("Where am I?"))
    assert other.pieces is codec.pieces
    assert other.breakers(["am"]) == codec.breakers(["am"]) != ()
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        codec.with_template("{% for m in messages %}")


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<|fim_prefix|>def f(<|fim_suffix|>): x<|fim_middle|>",
        ),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>def f(<fim_suffix>): x<fim_middle>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>def f(<｜fim▁hole｜>): x<｜fim▁end｜>",
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]): x[PREFIX]def f("),
    ],
)
def test_what_is_between_two_texts_is_asked_for_by_the_marks_of_the_tokenizer(
    tmp_path: Path, marks: tuple[str, ...], expected: str, is_special: bool
) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in marks])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    codec = TextCodec(str(tmp_path))
    found = codec.encode_between("def f(", "): x")
    assert found == tokenizer.encode(expected).ids
    assert {tokenizer.token_to_id(mark) for mark in marks} < set(found)


def test_a_model_without_marks_cannot_fill_in_text(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="no marks for it") as refused:
        codec.encode_between("def f(", "): x")
    assert refused.value.field == "suffix"
