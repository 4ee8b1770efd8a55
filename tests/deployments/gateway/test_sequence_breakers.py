from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from deployments.gateway.sequence_breakers import breaker_ids
from deployments.tokenizer.text_codec import TextCodec
from tests.deployments.trained_tokenizers import byte_fallback_bpe, byte_level, metaspace


@pytest.mark.parametrize("make", [byte_level, byte_fallback_bpe, metaspace])
def test_a_breaker_is_every_token_that_has_it_and_what_spells_it(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=make()).save_pretrained(tmp_path)
    codec = TextCodec(str(tmp_path))
    breakers = breaker_ids(codec, (":", "zq zq"))
    having = {token_id for token_id in range(codec.vocab_size) if b":" in codec.pieces.spelling(token_id)}
    assert {word[0] for word in breakers if len(word) == 1} == having
    for text in ("x:y", "x :", ": x"):
        assert having & set(codec.encode_text(text, has_special_tokens=False))
    assert {word for word in breakers if len(word) > 1} >= set(codec.encode_word("zq zq"))


def test_no_strings_are_no_breakers(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(tmp_path)
    assert breaker_ids(TextCodec(str(tmp_path)), ()) == ()
