from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from engine.sampling.grammar_tokenizer import read_tokenizer
from tests.deployments.trained_tokenizers import byte_fallback_bpe, byte_fallback_unigram, byte_level

TEXT = "The quick brown fox — 👋🏽 <tool> naïve tag"


@pytest.mark.parametrize("make", [byte_level, byte_fallback_bpe, byte_fallback_unigram])
@pytest.mark.parametrize("num_more", [-3, 0, 9])
def test_all_but_what_spells_a_token_is_as_the_library_reads_it(make: Callable[[], Tokenizer], num_more: int) -> None:
    content, size = make().to_str(), make().get_vocab_size()
    plain = read_tokenizer(content, size + num_more, [2, 4])
    found = LLTokenizer(content, n_vocab=max(size, size + num_more), eos_token=[2, 4])
    assert (plain.vocab_size, plain.eos_tokens) == (found.vocab_size, found.eos_tokens)
    for token_id in range(found.vocab_size):
        assert plain.decode_bytes([token_id]) == found.decode_bytes([token_id])
        is_text = token_id == make().token_to_id("<tool>")
        assert plain.is_special_token(token_id) == (found.is_special_token(token_id) and not is_text)
    assert plain.tokenize_str(TEXT) == found.tokenize_str(TEXT)


def test_a_grammar_that_spells_a_special_token_wants_text_and_one_that_names_it_the_token() -> None:
    tokenizer = read_tokenizer(byte_level().to_str(), byte_level().get_vocab_size(), [2])
    special = byte_level().token_to_id("</s>")
    spelt = LLMatcher(tokenizer, grammar_from("choice", json.dumps(["</s>"])), log_level=0)
    forced = spelt.compute_ff_tokens()
    assert special not in forced
    assert tokenizer.decode_str(forced) == "</s>"
    named = LLMatcher(tokenizer, grammar_from("lark", "start: </s>"), log_level=0)
    assert named.compute_ff_tokens() == [special]


def test_an_added_token_that_is_not_special_is_text_unless_it_ends_answers() -> None:
    token_id, size = byte_level().token_to_id("<tool>"), byte_level().get_vocab_size()
    tokenizer = read_tokenizer(byte_level().to_str(), size, [2])
    matcher = LLMatcher(tokenizer, grammar_from("regex", "(<tool>|x)*"), log_level=0)
    assert matcher.try_consume_tokens([token_id, token_id]) == 2
    assert matcher.is_accepting()
    tokenizer = read_tokenizer(byte_level().to_str(), size, [token_id])
    matcher = LLMatcher(tokenizer, grammar_from("regex", "(<tool>|x)*"), log_level=0)
    assert matcher.try_consume_tokens([token_id]) == 1
    assert matcher.is_stopped()
