from __future__ import annotations

from argparse import ArgumentParser, Namespace

import pytest

from loadtest.arguments import slo_of
from loadtest.measure import Slo
from loadtest.users.options import add_options, mix_of


def parse(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def test_options_become_a_mix_and_objectives() -> None:
    options = parse("--max-answer-tokens", "8", "--slo-tpot-ms", "40", "--zipf-exponent", "0")
    mix = mix_of(options, ("a", "b"))
    assert (mix.models, mix.min_answer_tokens, mix.max_answer_tokens, mix.zipf_exponent) == (("a", "b"), 8, 8, 0)
    assert slo_of(options) == Slo(tpot_ms=40)


def test_names_are_parted_by_commas_and_nonsense_is_refused() -> None:
    assert parse("--models", "a, b").models == ("a", "b")
    assert parse().models == ()
    for wrong in (("--models", "a,"), ("--max-answer-tokens", "0"), ("--slo-ttft-ms", "0")):
        with pytest.raises(SystemExit):
            parse(*wrong)


def test_no_objective_is_the_default() -> None:
    assert slo_of(parse()) == Slo()
