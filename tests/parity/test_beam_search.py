"""The continuations that a beam search finds are those of transformers, token by token and score by score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deployments.gateway.beam_search import BeamSearch
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from tests.parity.conftest import MAX_LEN, VOCAB, Checkpoint, emissions_of, greedy, random_prompts

NUM_TOKENS = 12


def found_by(engine: Engine, prompt: tuple[int, ...], search: BeamSearch) -> list[tuple[list[int], float]]:
    while search.open:
        requests = []
        for index, beam in enumerate(search.open):
            request = greedy(str(index), (*prompt, *beam.token_ids), 1)
            requests.append(replace(request, params=replace(request.params, num_logprobs=search.num_expansions)))
        found = emissions_of(engine, requests)
        search.advance([found[request.request_id][0].logprobs[0] for request in requests])
    return [(list(beam.token_ids), beam.logprob) for beam in search.found]


@pytest.mark.parametrize(
    ("width", "length_penalty", "num_ends"),
    [(1, 1.0, 0), (3, 1.0, 0), (4, 1.0, 40), (3, 0.0, 20), (2, 2.0, 20), (3, -1.0, 60)],
)
def test_continuations_and_scores_are_those_of_transformers(
    checkpoint: Callable[[str], Checkpoint], width: int, length_penalty: float, num_ends: int
) -> None:
    model = checkpoint("llama3")
    # Of random weights no one token is likely: so many end an answer that some answers end early.
    ends = list(range(0, VOCAB, VOCAB // num_ends))[:num_ends] if num_ends else []
    config = EngineConfig(model_path=model.path, dtype="float32", max_model_len=MAX_LEN, num_threads=1, max_num_seqs=8)
    engine = build_engine(config)
    lengths: list[int] = []
    for prompt in random_prompts(3, 30):
        search = BeamSearch(width, max_tokens=NUM_TOKENS, length_penalty=length_penalty, ends=frozenset(ends))
        found = found_by(engine, prompt, search)
        with torch.inference_mode():
            theirs = model.model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
                num_beams=width, num_return_sequences=width, length_penalty=length_penalty, early_stopping=False,
                max_new_tokens=NUM_TOKENS, eos_token_id=ends or None, pad_token_id=VOCAB - 1,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        assert len(found) == width
        lengths += [len(token_ids) for token_ids, _ in found]
        scores = getattr(theirs, "sequences_scores", None)
        for place, (token_ids, logprob) in enumerate(found):
            expected = theirs.sequences[place, len(prompt) :].tolist()
            assert expected[: len(token_ids)] == token_ids
            assert set(expected[len(token_ids) :]) <= {VOCAB - 1}
            if scores is not None:
                assert float(scores[place]) == pytest.approx(
                    logprob / math.pow(len(token_ids), length_penalty), abs=1e-3
                )
    if length_penalty <= 1:  # beyond it the longest are the best
        assert any(length < NUM_TOKENS for length in lengths) == bool(num_ends)
