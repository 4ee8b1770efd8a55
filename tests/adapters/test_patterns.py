"""Patterns of adapters: what PEFT makes of them, and what they may cost."""

from __future__ import annotations

import threading
import time

import pytest

from adapters.errors import AdapterError
from adapters.patterns import END_OF_NAME, LAYER, MAX_PATTERN_CHARS, MAX_PATTERNS_S, WHOLE_NAME, Patterns
from tests.adapters.handmade import SHAPES

Q3 = "model.layers.3.self_attn.q_proj"
_PARTS = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer"
_LINEAR = r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
UNSLOTH = (
    rf"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:{_PARTS}).*?{_LINEAR})"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{_PARTS})\.(?:{_LINEAR}))"
)
"""What `FastModel.get_peft_model` of Unsloth targets by default."""
CATASTROPHES = (r"(?:a+|.|..)+[!?]", r"(.|.|.)*?[!?]", r"((.{1,30}){1,10}){1,10}[!?]", r"(?:.|\w|[^.]){0,90}?[!?]")


def spent_s(patterns: Patterns) -> float:
    return MAX_PATTERNS_S - patterns._left_s


def of_one(form: str, pattern: str) -> Patterns:
    patterns = Patterns("demo")
    patterns.add("target_modules", form, pattern)
    return patterns


@pytest.mark.parametrize(
    "pattern",
    [
        UNSLOTH,
        UNSLOTH.replace("mlp|", ""),
        r".*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|o_proj).*?",
        r"^(model(?=\.).*\.(q_proj|k_proj))$",
        r"^(?!.*(lm_head|embed)).*layers\.(0|[1-9]\d{0,1})\..*_proj",
        r"(?i).*Q_PROJ",
        Q3,
        r"model.layers.1.mlp.(up|down)_proj",
        r".*\.q_proj|.*\.v_proj",
        "embed_tokens|lm_head",
    ],
)
def test_whole_names_are_matched_as_peft_matches_them(pattern: str) -> None:
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    config = pytest.importorskip("peft").LoraConfig(target_modules=pattern)
    patterns = of_one(WHOLE_NAME, pattern)
    names = [*SHAPES, Q3, "model.layers.13.self_attn.q_proj", "model.language_model.layers.7.mlp.up_proj"]
    found = {name for name in names if patterns.match(WHOLE_NAME, pattern, name)}
    assert found == {name for name in names if tuners.check_target_module_exists(config, name)}


@pytest.mark.parametrize(
    "key", ["q_proj", r"layers\.3\..*", "3.self_attn.q_proj", "^q_proj", "(q|k)_proj", "proj", "a|b"]
)
def test_ends_of_names_are_matched_as_peft_matches_them(key: str) -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key
    patterns = of_one(END_OF_NAME, key)
    for name in [*SHAPES, Q3, "xq_proj"]:
        assert (patterns.match(END_OF_NAME, key, name) is not None) == (get_pattern_key([key], name) != name), name


def test_a_layer_is_the_first_that_the_pattern_is_followed_by() -> None:
    found = of_one(LAYER, "layers").match(LAYER, "layers", "model.layers.3.experts.layers.5.up_proj")
    assert found is not None
    assert found["idx"] == "3"


@pytest.mark.parametrize("pattern", CATASTROPHES)
def test_a_catastrophe_is_refused_soon_and_stops_nobody(pattern: str) -> None:
    """Python's own matcher would take years, and let no other thread run."""
    patterns = of_one(WHOLE_NAME, pattern)
    beats, ended = [time.thread_time()], threading.Event()

    def beat() -> None:
        while not ended.wait(0.001):
            beats.append(time.thread_time())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(AdapterError, match="seconds to match"):
            patterns.match(WHOLE_NAME, pattern, Q3)
    finally:
        ended.set()
        thread.join()
    assert len(beats) > 5
    assert spent_s(patterns) < 2 * MAX_PATTERNS_S


def test_many_slow_patterns_have_no_more_time_than_one() -> None:
    patterns = Patterns("demo")
    slow = [rf"(?:.{{1,5}}){{1,6}}(?:.?){{{index}}}[!?]" for index in range(8, 40)]
    for pattern in slow:
        patterns.add("rank_pattern", END_OF_NAME, pattern)
    with pytest.raises(AdapterError, match="seconds to match"):
        [patterns.match(END_OF_NAME, pattern, name) for pattern in slow for name in SHAPES]
    assert spent_s(patterns) < 2 * MAX_PATTERNS_S


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(?:(?:(?:a?){400}){400}){400}", "braces"),
        ("(?:a{0,65535}){0,65535}", "braces"),
        ("(?:" + "(ab)" * 500 + "){100}", "braces"),
        ("(?:q_proj){e<=2}", "braces"),
        ("(?x)a{1 000 000}", "braces"),
        ("a" * (MAX_PATTERN_CHARS + 1), "longer"),
        ("(", "not a regular expression"),
        ("(?R)", "not a regular expression"),
        (r"\p{L}", "braces"),
        ("(?:" * 1000 + ")" * 1000, "not a regular expression"),
        ("a{4294967296}", "braces"),
    ],
)  # fmt: skip
def test_what_would_take_too_much_to_compile_or_is_no_pattern_is_refused(pattern: str, word: str) -> None:
    with pytest.raises(AdapterError, match=word) as caught:
        of_one(WHOLE_NAME, pattern)
    assert caught.value.reason.startswith("target_modules has a pattern")


def test_a_name_for_every_module_of_a_large_model_costs_next_to_nothing() -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(500)]
    patterns = Patterns("demo")
    for name in names:
        patterns.add("rank_pattern", END_OF_NAME, name)
    assert sum(patterns.match(END_OF_NAME, pattern, name) is not None for pattern in names for name in names) == 500
    assert spent_s(patterns) == 0
