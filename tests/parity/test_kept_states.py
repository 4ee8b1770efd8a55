"""States that are kept at the ends of prefixes: who goes on from one gets transformers' own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from adapters.registry import reference
from engine.build import build_engine
from engine.engine import Engine
from engine.fallback.decoder import FallbackDecoder
from engine.request import Request
from tests.engine.conftest import near_states
from tests.parity.conftest import NEEDS_LATER, Checkpoint, emissions_of, greedy, random_prompts, run_engine, saved_once
from tests.parity.gpu_parts import Replays
from tests.parity.test_fallback import config_of
from tests.parity.test_states import MODELS, NUM_TOKENS, make

__all__ = ["near_states"]

pytestmark = [pytest.mark.usefixtures("near_states"), NEEDS_LATER]

DELTA_BYTES = 3 * (4 * 128 * 4 + 4 * 16 * 16 * 4)
"""What a text keeps of it, in float32."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Give the checkpoint of an architecture, made at the first call."""
    return saved_once(make, tmp_path_factory)


def engine_of(checkpoint: Checkpoint, **options: Any) -> Engine:
    """Return an engine whose places hold what no state is."""
    engine = build_engine(config_of(checkpoint.path, **{"block_tokens": 16, "max_num_seqs": 4, **options}))
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    model = engine._runner._model  # type: ignore[attr-defined]  # its runner is one
    decoder = model if isinstance(model, FallbackDecoder) else model._decoder
    assert decoder._states._kept
    for states in decoder._states._kept.values():
        for state in states.values():
            state.fill_(torch.nan)


def cached_of(engine: Engine, checkpoint: Checkpoint, requests: Sequence[Request]) -> list[int]:
    """Serve requests side by side, compare them with transformers, and return how much of each prompt was found."""
    emissions = emissions_of(engine, requests)
    found = {name: [token for one in each for token in one.token_ids] for name, each in emissions.items()}
    assert found == {one.request_id: checkpoint.generate(one.prompt_ids, one.params.max_tokens) for one in requests}
    return [emissions[request.request_id][-1].num_cached_tokens for request in requests]


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_is_computed_once(saved: Callable[[str], Checkpoint], name: str) -> None:
    checkpoint, said = saved(name), random_prompts(5, longest=40, seed=3)[1:]
    engine, text, found = engine_of(checkpoint), (1, *said[0]), []
    for turn, more in enumerate(said):
        request = greedy(str(turn), text, 20)
        found += cached_of(engine, checkpoint, [request])
        text = (*text, *checkpoint.generate(text, 20), *more)
    lengths = [len(said[0]) + 1]
    for more in said[:-1]:
        lengths.append(lengths[-1] + 20 + len(more))
    # From the last block that the answer before has filled; its last token has not been computed.
    ends = [0] + [(length + 19) // 16 * 16 for length in lengths[:-1]]
    assert found == ends


@pytest.mark.parametrize("options", [{}, {"max_batched_tokens": 7}, {"max_batched_tokens": 33}])
def test_who_goes_on_is_one_row_of_a_step_of_many(saved: Callable[[str], Checkpoint], options: dict[str, Any]) -> None:
    checkpoint, prompts = saved("Qwen3_5ForCausalLM"), random_prompts(6, longest=60)
    engine = engine_of(checkpoint, **options)
    first = cached_of(engine, checkpoint, [greedy(str(i), prompt, 20) for i, prompt in enumerate(prompts)])
    assert first == [0] * 6
    texts = [(*prompt, *checkpoint.generate(prompt, 20), 7, 8, 9) for prompt in prompts]
    again = cached_of(engine, checkpoint, [greedy(f"again {i}", text, 20) for i, text in enumerate(texts)])
    assert again == [(len(prompt) + 19) // 16 * 16 for prompt in prompts]


def test_what_many_prompts_begin_with_is_found_by_the_third(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint, (_, common, *rest) = saved("Qwen3_5ForCausalLM"), random_prompts(5, longest=50)
    engine = engine_of(checkpoint)
    requests = [greedy(str(i), (*common, i, *own, *range(30)), NUM_TOKENS) for i, own in enumerate(rest)]
    assert [cached_of(engine, checkpoint, [request]) for request in requests] == [[0], [0], [48]]


def test_who_had_to_give_way_goes_on_from_its_state(saved: Callable[[str], Checkpoint]) -> None:
    """The cache holds seven blocks, of keys of one layer, and three requests of four each come."""
    checkpoint = saved("Qwen3_5ForCausalLM")
    prompts = [(number, *prompt * 20) for number, prompt in enumerate(random_prompts(1, longest=60) * 3)]
    sizes = {"max_model_len": 64, "kv_cache_bytes": 7 * 16 * 2 * 2 * 16 * 4, "state_cache_bytes": 5 * DELTA_BYTES}
    engine = engine_of(checkpoint, **sizes)
    assert engine.config.num_snapshots == 5
    assert cached_of(engine, checkpoint, [greedy(str(i), prompt, 40) for i, prompt in enumerate(prompts)]) == [0] * 3
    assert engine.snapshot().counters.num_preemptions > 0


def test_a_stream_that_is_resumed_goes_on_from_what_is_here(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint, prompt = saved("Qwen3_5ForCausalLM"), random_prompts(2, longest=50)[1]
    engine, answer = engine_of(checkpoint), checkpoint.generate(prompt, 40)
    run_engine(engine, [greedy("lost", prompt, 30)])
    emissions = emissions_of(engine, [greedy("resumed", prompt, 40, prior_output_ids=tuple(answer[:25]))])["resumed"]
    assert [token for one in emissions for token in one.token_ids] == answer[25:]
    # Of the prompt's 50; it goes on from 64.
    assert emissions[-1].num_cached_tokens == 50


def test_a_state_of_one_adapter_or_salt_is_not_found_by_another(
    saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    model = peft.get_peft_model(
        make("Qwen3_5ForCausalLM"), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    )
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    base, adapter = saved("Qwen3_5ForCausalLM"), reference("tuned", str(tmp_path))
    tuned = Checkpoint(path=str(tmp_path), model=model.eval())
    engine = build_engine(config_of(base.path, max_num_seqs=4), [adapter])
    poison(engine)
    prompt = random_prompts(2, longest=50)[1]
    for turn in range(2):
        plain, salted = (
            greedy(f"plain {turn}", prompt, NUM_TOKENS),
            greedy(f"salted {turn}", prompt, NUM_TOKENS, salt="x"),
        )
        ours = greedy(f"tuned {turn}", prompt, NUM_TOKENS, adapter=adapter.digest)
        expected = 48 if turn else 0
        assert cached_of(engine, base, [plain]) == [expected]
        assert cached_of(engine, tuned, [ours]) == [expected]
        assert cached_of(engine, base, [salted]) == [expected]


def test_the_operators_of_a_gpu_copy_states_too(
    saved: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt by launched steps, of its answer by recorded ones, around which states are copied."""
    replays = Replays(monkeypatch)
    checkpoint, prompt = saved("Qwen3_5ForCausalLM"), random_prompts(2, longest=40)[1]
    engine = engine_of(checkpoint, kv_cache_bytes=1 << 22, max_batched_tokens=16, device="cuda")
    text = (*prompt, *checkpoint.generate(prompt, NUM_TOKENS), 3)
    assert cached_of(engine, checkpoint, [greedy("first", prompt, NUM_TOKENS)]) == [0]
    assert cached_of(engine, checkpoint, [greedy("second", text, NUM_TOKENS)]) == [32]
    num_tokens = 66 - len(text)
    longer = (*text, *checkpoint.generate(text, num_tokens), 3)
    assert cached_of(engine, checkpoint, [greedy("third", text, num_tokens)]) == [32]
    assert cached_of(engine, checkpoint, [greedy("fourth", longer, NUM_TOKENS)]) == [64]
    assert replays.are_there


def test_no_more_is_kept_than_there_is_room_for(saved: Callable[[str], Checkpoint]) -> None:
    engine = engine_of(saved("Qwen3_5ForCausalLM"), state_cache_bytes=2 * DELTA_BYTES + 1)
    assert engine.config.num_snapshots == 2
    prompts = [(number, *random_prompts(2, longest=40)[1]) for number in range(4)]
    found = [cached_of(engine, saved("Qwen3_5ForCausalLM"), [greedy(str(i), p, 4)]) for i, p in enumerate(prompts * 2)]
    # Each is asked for when it has just been given up.
    assert found == [[0]] * 8
