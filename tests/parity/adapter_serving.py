"""A tiny random base in the Hugging Face layout, and an engine over it that is asked for adapters by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from engine.request import Emission, FinishReason, Request, RequestId, SamplingParams

NUM_TOKENS = 20
VOCAB = 128
GEOMETRY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


@contextmanager
def starting(checkpoint: str, path_by_name: dict[str, str]) -> Iterator[Callable[..., Serving]]:
    """Yield what starts engines over the checkpoint, by options; all are ended behind the block."""
    started: list[Serving] = []

    def start(**options: int) -> Serving:
        started.append(Serving(checkpoint, path_by_name, **options))
        return started[-1]

    yield start
    for serving in started:
        serving.engine.stop()
        serving.engine.run(lambda _: None)


def make_base(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**GEOMETRY)).eval()
    geometry = {**GEOMETRY, "tie_word_embeddings": family == "qwen2-tied"}
    model = Qwen2ForCausalLM(Qwen2Config(**geometry)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())


class Serving:
    """An engine over the checkpoint, with all adapters declared."""

    def __init__(self, checkpoint: str, path_by_name: dict[str, str], **options: int) -> None:
        refs = [reference(name, path) for name, path in path_by_name.items()]
        self.digest_by_name = {ref.name: ref.digest for ref in refs}
        settings = {"max_num_seqs": 32, "kv_cache_bytes": 4 << 20, "num_threads": 1, **options}
        config = EngineConfig(model_path=checkpoint, device="cpu", dtype="float32", **settings)  # type: ignore[arg-type]
        self.engine = build_engine(config, refs)
        self._num_requests = 0

    def add(self, name: str, length: int, **changes: object) -> RequestId:
        self._num_requests += 1
        request = Request(
            request_id=RequestId(f"{self._num_requests}"),
            prompt_ids=prompt_of(length),
            params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True),
            adapter=self.digest_by_name.get(name),
        )
        self.engine.add(replace(request, **changes))  # type: ignore[arg-type]
        return request.request_id

    def finish(self, ids: list[RequestId]) -> dict[RequestId, list[Emission]]:
        """Step until all the requests have ended; loads are awaited in between, as they come from other threads."""
        emissions: dict[RequestId, list[Emission]] = {request_id: [] for request_id in ids}
        open_ids = set(ids)
        deadline_s = time.monotonic() + 60
        while open_ids:
            assert time.monotonic() < deadline_s
            stepped = self.engine.step()
            for emission in stepped:
                emissions[emission.request_id].append(emission)
                if emission.finish_reason is not None:
                    open_ids.discard(emission.request_id)
            if not stepped:
                time.sleep(0.001)
        return emissions

    def answers(self, asked: list[tuple[str, int]]) -> list[tuple[int, ...]]:
        ids = [self.add(name, length) for name, length in asked]
        done = self.finish(ids)
        assert all(done[i][-1].finish_reason == FinishReason.LENGTH for i in ids)
        return [tuple(token for emission in done[i] for token in emission.token_ids) for i in ids]
