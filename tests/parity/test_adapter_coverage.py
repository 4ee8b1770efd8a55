"""What adapters change beyond low-rank products, against peft, token by token."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import peft
import pytest

from engine.request import RequestId
from kernels import native
from tests.parity.adapter_serving import NUM_TOKENS, Serving, make_base, prompt_of, starting
from tests.parity.interrupted import interrupted
from tests.parity.peft_adapters import BEYOND_PRODUCTS, TOKENS, generated, save_adapters, save_beyond_products

PROMPT_LENGTHS = (3, 21)
PLAIN = "everything"
BASE = "base"


@pytest.fixture(scope="module", params=["llama", "qwen2-tied"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path_by_name(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp(family)
    plain = save_adapters(make_base(family), folder)[PLAIN]
    return {PLAIN: plain, **save_beyond_products(lambda: make_base(family), folder)}


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp(f"{family}-base"))
    make_base(family).save_pretrained(folder)
    return folder


Expected = dict[tuple[str, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def expected(family: str, path_by_name: dict[str, str]) -> Expected:
    """What peft generates greedily for every adapter and the base, each loaded onto a base of its own."""
    answers = {}
    for name in (BASE, *path_by_name):
        model = make_base(family)
        if name != BASE:
            model = peft.PeftModel.from_pretrained(model, path_by_name[name]).eval()
        for length in PROMPT_LENGTHS:
            answers[(name, length)] = generated(model, prompt_of(length), NUM_TOKENS)
    assert len(set(answers.values())) == len(answers), "adapters without effect prove nothing"
    for length in PROMPT_LENGTHS:
        asked, drawn = prompt_of(length), answers["tokens-of-each-end", length]
        assert all(set(TOKENS) & set(tokens) for tokens in (asked, drawn)), "nor do rows of tokens that do not occur"
    return answers


@pytest.fixture(params=["kernels", "operators"])
def serve(
    request: pytest.FixtureRequest, checkpoint: str, path_by_name: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Serving]]:
    """Start an engine by our own kernels, or by torch's operators as where there is no compiler."""
    if request.param == "operators":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    else:
        assert native.load() is not None
    with starting(checkpoint, path_by_name) as start:
        yield start


@pytest.mark.parametrize("options", [{}, {"max_batched_tokens": 7, "max_num_seqs": 7}], ids=["at once", "chunks of 7"])
def test_all_of_them_mix_with_products_and_the_base_in_one_batch(
    serve: Callable[..., Serving], expected: Expected, options: dict[str, int]
) -> None:
    serving = serve(**options)
    serving.answers([(name, 3) for name in BEYOND_PRODUCTS])
    asked = random.Random(5).sample(sorted(expected), len(expected))
    assert serving.answers(asked) == [expected[pair] for pair in asked]


def test_a_step_that_newcomers_went_before_goes_on_as_if_it_had_not_paused(
    serve: Callable[..., Serving], expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve()
    serving.answers([(name, 3) for name in BEYOND_PRODUCTS])
    asked = random.Random(7).sample(sorted(expected), len(expected))
    ids = [serving.add(name, length, tenant="first") for name, length in asked[:8]]

    def latecomer(name: str, length: int) -> Callable[[], None]:
        return lambda: ids.append(serving.add(name, length, tenant=f"{name} {length}"))

    latecomers = [latecomer(*pair) for pair in reversed(asked[8:])]
    tokens: dict[RequestId, list[int]] = defaultdict(list)
    with interrupted(serving.engine, latecomers, monkeypatch) as asides:
        while latecomers or serving.engine.snapshot().num_running:
            for emission in serving.engine.step():
                assert emission.error is None
                tokens[emission.request_id] += emission.token_ids
    assert [tuple(tokens[request_id]) for request_id in ids] == [expected[pair] for pair in asked]
    # Torch's operators do not pause: there newcomers come between steps.
    assert len(asides) > 2 or not asides
