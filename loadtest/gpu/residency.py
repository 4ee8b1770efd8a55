"""Benchmark of more adapters than fit on a GPU: the comparisons of `loadtest.adapter_residency`, on random weights.

The layers have a model's sizes, but are fewer. An adapter of rank 16 on all linear modules takes 20 MiB with 8 of
Llama-3.1-8B's 32 layers, 80 with all. Host memory for adapters is scaled alike: by default a large host has 32 GiB of
it, so here 8, for 409 of 1,000 adapters. The most popular are loaded beforehand, the others on demand. Not scaled: the
vocabulary, and the host's work in each step.

All adapters have the content of one folder, under a digest each, and no memory in common (`SHARED`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from adapters.identity import AdapterDigest, AdapterRef
from engine.build import build_engine
from engine.config import EngineConfig
from loadtest.adapter_residency import PROMPT_TOKENS, Compared, Streams, compared, draws, each_of
from loadtest.adapter_residency import measure as measure_rounds
from loadtest.engine_alone import EngineAlone
from loadtest.geometries import CONFIG_BY_NAME
from loadtest.gpu.engine import ADAPTER_BYTES, RANK, random_weights, write_adapters, write_config

SHARED = (
    "the adapters share one tensor file, which stays in the page cache. Each load reads it, computes its digest and "
    "lays it out in page-locked memory of its own; each placement copies that to device memory of its own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """How many adapters, of how many layers, and who asks for them.

    Attributes:
        preloaded: adapters requested once before the rounds, the most popular.
        zipf: exponent of the popularity.
        answer_tokens: of a mean answer.
        requests: of each case in each round.
    """

    layers: int = 8
    registered: int = 1000
    preloaded: int = 400
    host_bytes: int = 8 << 30
    slots: int = 32
    zipf: float = 1.0
    streams: int = 16
    answer_tokens: int = 64
    requests: int = 128
    repeats: int = 3


ALL_IN_HOST_MEMORY = Crowd(preloaded=1000, host_bytes=32 << 30)


def measure(model: str, crowd: Crowd, **changes: Any) -> Iterator[list[Compared]]:
    """Run the cases on one engine and yield the rows after each round; `changes` override the engine's settings."""
    with TemporaryDirectory() as folder:
        spec = write_config(Path(folder), CONFIG_BY_NAME[model] | {"num_hidden_layers": crowd.layers})
        (stored,) = write_adapters(Path(folder) / "adapters", spec, 1)
        digests = [AdapterDigest(hashlib.sha256(b"%d" % number).hexdigest()) for number in range(crowd.registered)]
        config = EngineConfig(
            model_path=folder,
            max_num_seqs=crowd.streams,
            max_model_len=PROMPT_TOKENS + 2 * crowd.answer_tokens,
            max_adapter_rank=RANK,
            max_device_adapters=crowd.slots,
            max_device_adapter_bytes=ADAPTER_BYTES,
            max_host_adapter_bytes=crowd.host_bytes,
            **dict[str, Any](device="cuda", dtype="bfloat16") | changes,
        )
        refs = [AdapterRef(name=digest[:12], path=stored.path, digest=digest) for digest in digests]
        alone = EngineAlone(build_engine(config, refs, random_weights, locate=lambda _ref: stored))
        try:
            streams = Streams(alone=alone, num_streams=crowd.streams, answer_tokens=crowd.answer_tokens)
            streams.run(each_of(digests[: crowd.preloaded]), crowd.preloaded)
            cases = draws(digests, crowd.slots, crowd.zipf)
            yield from map(compared, measure_rounds(streams, cases, requests=crowd.requests, repeats=crowd.repeats))
        finally:
            alone.close()
