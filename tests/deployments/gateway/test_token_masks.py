from __future__ import annotations

import pytest

from deployments.gateway.token_masks import check_some_are_left, check_token_ids
from engine.errors import RequestError
from engine.request import SamplingParams

EOS = (2,)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, bad_words=((5,),)),
        SamplingParams(max_tokens=9, allowed_token_ids=(2,)),
        SamplingParams(max_tokens=9, allowed_token_ids=(2,), min_tokens=3, ignore_eos=True),
        SamplingParams(max_tokens=9, allowed_token_ids=(2, 4), min_tokens=3),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5, 6), bad_words=((4,), (5, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4, 4), (5, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5, 5),)),
        SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5, 5, 5),), min_tokens=2),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((2, 4), (2, 5), (9, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4,), (4, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4, 4), (4, 4, 5))),
        SamplingParams(max_tokens=2, allowed_token_ids=(5,), bad_words=((5, 5, 5),)),
    ],
)
def test_some_token_is_left(params: SamplingParams) -> None:
    check_some_are_left(params, EOS)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(max_tokens=9, allowed_token_ids=(2,), min_tokens=1), "'min_tokens' leaves"),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(2, 7), stop_token_ids=(7,), min_tokens=1),
            "'min_tokens' leaves",
        ),
        (SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4,), (5,))), "'bad_words' leaves"),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5,),), min_tokens=1),
            "'bad_words' and 'min_tokens' leave",
        ),
        (SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4,), (5, 5))), r"leaves after .* \[5\];"),
        (SamplingParams(max_tokens=3, allowed_token_ids=(5,), bad_words=((5, 5, 5),)), r"leaves after .* \[5, 5\];"),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4, 5, 5), (5, 4))),
            r"'bad_words' leaves after the tokens \[4, 5\];",
        ),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5, 5, 5),), min_tokens=3),
            r"'bad_words' and 'min_tokens' leave after the tokens \[5, 5\];",
        ),
    ],
)
def test_what_forbids_all_that_it_allows_is_refused(params: SamplingParams, words: str) -> None:
    """Where the engine would find no finite number, and call it a failure of its own."""
    with pytest.raises(RequestError, match=words) as refused:
        check_some_are_left(params, EOS)
    assert refused.value.field == "allowed_token_ids"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=9, logit_bias=((9, 1.0),)), "logit_bias"),
        (SamplingParams(max_tokens=9, allowed_token_ids=(1, 9)), "allowed_token_ids"),
        (SamplingParams(max_tokens=9, stop_token_ids=(9,)), "stop_token_ids"),
    ],
)
def test_tokens_that_the_model_has_not_are_refused(params: SamplingParams, field: str) -> None:
    check_token_ids(params, vocab_size=10)
    with pytest.raises(RequestError) as refused:
        check_token_ids(params, vocab_size=9)
    assert refused.value.field == field
