"""Steps of every size, run at start: their kernels are compiled before a request comes, and the fullest step measured.

    tokens    1, 2, 4, ...       one for each row up to `max_num_seqs`, the rest chunks of prompts
              max_batched_tokens chunks only

Launches are specialized by powers of two of a step's sizes and, of a prompt's log-probabilities, by how the first line
is aligned; by nothing else that changes from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from engine.attention import AttentionBatch
from engine.cache.layout import CacheLayout
from engine.config import ResolvedConfig
from engine.decoder.decoder import Decoder, DecoderBatch
from engine.fallback.decoder import FallbackDecoder
from engine.gpu.adapters import TritonLora
from engine.gpu.choosing import TokenChooser
from engine.kv_cache import KvCache
from engine.request import SamplingParams
from engine.scheduling.live_request import PENDING
from kernels.embedding.launch import put_drawn

LOGIT_COPIES = 10
"""Buffers the size of a full batch's logits that are allocated to measure what sampling may need.

Beside the logits and a copy for log-probabilities, draws by torch's operators take up to 5.5
(`engine.sampling.sampler.ROWS_AT_ONCE`), and penalties' tables 1.25.
"""


class Rehearsal:
    """Steps over a cache of one block, whose tokens are not written to it.

    Args:
        adapters: those of the decoder's backend.
        cache_dtype: dtype of the cache.
    """

    def __init__(
        self,
        decoder: Decoder | FallbackDecoder,
        adapters: TritonLora,
        choose: TokenChooser,
        config: ResolvedConfig,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._choose = choose
        self._config = config
        self._cache_dtype = cache_dtype
        self._device = device

    @torch.inference_mode()
    def run(self) -> None:
        """Run every step, with adapters and without, and choose a token."""
        config, cache = self._config, self._cache()
        for rows, num_decodes in _steps(config):
            for has_adapters in (False, True):
                self._adapters.expect(len(rows) if has_adapters else 0)
                batch = self._batch(rows, num_decodes, cache.null_block)
                decodes = batch.attention[0].rows[:num_decodes]
                put_drawn(batch.token_ids[:num_decodes], decodes, torch.zeros_like(batch.token_ids), PENDING)
                self._decoder.forward(batch, cache)
        self._adapters.expect(0)
        logits = torch.zeros(LOGIT_COPIES, config.max_num_seqs, self._decoder.spec.vocab_size, device=self._device)
        params = [SamplingParams(max_tokens=1)]
        self._choose.edit(logits[0, :1], params, {}, {0: -1}, None)
        token_ids = self._choose(logits[0, :1], params, [0])
        # Of prompts, also from lines on that an odd vocabulary aligns otherwise.
        for first in (0, 1):
            self._choose.tell(logits[0, first : first + 1], token_ids, 0)

    def decodes(self, position: int = 0) -> Iterator[Callable[[], torch.Tensor]]:
        """Yield decode steps that return their logits, of one row and of all, with adapters and without.

        Each can be repeated until the next is asked for, and computes the same: rows with tokens of their own, at this
        position, or at the last one of shorter contexts, whose blocks are all one.
        """
        for count in (1, self._config.max_num_seqs):
            cache = self._cache(count)
            batch = self._decode_batch(count, min(position, self._config.max_model_len - 1), cache.null_block)
            for has_adapters in (False, True):
                self._adapters.expect(count if has_adapters else 0)
                yield partial(self._logits, batch, cache)
        self._adapters.expect(0)

    def _logits(self, batch: DecoderBatch, cache: KvCache) -> torch.Tensor:
        return self._decoder.forward(batch, cache).logits

    def _cache(self, num_blocks: int = 1) -> KvCache:
        spec = self._decoder.spec
        return KvCache(
            layout=CacheLayout.single(spec.num_layers),
            num_blocks=num_blocks,
            block_tokens=self._config.block_tokens,
            kv_shapes=spec.kv_shapes(),
            dtype=self._cache_dtype,
            device=self._device,
        )

    def _decode_batch(self, count: int, position: int, null_block: int) -> DecoderBatch:
        """Return a step of `count` rows with one token each, whose table names nothing but a block of its own."""
        batch = self._batch([(at, 1) for at in range(count)], count, null_block)
        (attention,), places = batch.attention, torch.arange(count, device=self._device)
        rows = attention.rows.clone()
        rows[:, 1], rows[:, 3] = position, places
        tables = places.unsqueeze(1).repeat(1, attention.tables.shape[1])
        slots = places * attention.block_tokens + position % attention.block_tokens
        return replace(
            batch,
            token_ids=places % self._decoder.spec.vocab_size,
            positions=torch.full_like(places, position),
            attention=(replace(attention, slots=slots, rows=rows, tables=tables),),
        )

    def _batch(self, rows: list[tuple[int, int]], num_decodes: int, null_block: int) -> DecoderBatch:
        """Return a step with (first token, number of tokens) for each row; all block tables name the same block."""
        config, device = self._config, self._device
        num_tokens = sum(count for _, count in rows)
        positions = torch.arange(num_tokens, device=device) % config.max_model_len
        return DecoderBatch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            sampled=torch.arange(min(num_tokens, config.max_num_seqs), device=device),
            attention=(
                AttentionBatch(
                    slots=torch.full_like(positions, -1),
                    rows=torch.tensor([(first, 0, count, 0) for first, count in rows], device=device),
                    tables=torch.zeros(1, config.max_blocks_per_request, dtype=torch.int64, device=device),
                    block_tokens=config.block_tokens,
                    null_block=null_block,
                    num_decodes=num_decodes,
                ),
            ),
        )


def _steps(config: ResolvedConfig) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Yield the rows of each step, and how many of them are decode rows of one token."""
    most = config.max_batched_tokens
    num_tokens = 1
    while num_tokens < most:
        num_decodes = min(num_tokens, config.max_num_seqs)
        rows = [(at, 1) for at in range(num_decodes)]
        yield rows + _chunks(num_decodes, num_tokens, config.max_model_len), num_decodes
        num_tokens *= 2
    yield _chunks(0, most, config.max_model_len), 0


def _chunks(start: int, end: int, longest: int) -> list[tuple[int, int]]:
    return [(at, min(longest, end - at)) for at in range(start, end, longest)]
