"""Sampling on a GPU without sorting: masks and penalties, the draw, and log-probabilities, each by kernels of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from engine.gpu.runtime import CudaRuntime
from engine.gpu.staging import Staging
from engine.request import SamplingParams
from engine.sampling.masks import Bits
from kernels.logit_edits.launch import WORD_BITS, edit_logits
from kernels.token_choice.launch import choose_tokens, counters
from kernels.token_logprobs import reference
from kernels.token_logprobs.launch import MAX_TOP, tell

_HALF = 1 << 63
_STAGED_BITS = 64
"""Bits of each number that is staged."""


class TokenChooser:
    """Masks and penalizes logits, and chooses tokens of rows that are greedy or use only temperature, top-k, top-p and
    min-p.
    """

    def __init__(self, runtime: CudaRuntime, max_rows: int, vocab_size: int) -> None:
        self._runtime = runtime
        self._num_staged = -(-vocab_size // _STAGED_BITS)
        self._staging = Staging(6 * max_rows, runtime)
        self._edits = Staging(6 * max_rows, runtime)
        self._words = Staging(self._num_staged * max_rows, runtime)
        self._no_tables = tuple(
            torch.zeros(1, 1, dtype=dtype, device=runtime.device) for dtype in (torch.bool, torch.int32)
        )
        self._params: Sequence[SamplingParams] = ()
        self._numbers = torch.zeros(0, dtype=torch.int64)
        self._arrived = counters(max_rows, runtime.device)

    def __call__(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> torch.Tensor:
        """Return a token id (int64, [rows]) for each row of `logits` [rows, vocab] float32; -1 where a row is unusable.

        A row with other truncation gets the token that it would draw without it. Callers never mutate `params`: what
        was derived from a sequence is reused for the same object.
        """
        rows = len(params)
        if params is not self._params:
            self._params = params
            knobs = [(p.temperature, _logarithm(p.min_p), p.top_k, p.top_p) for p in params]
            seeds = [(_signed(p.seed), 0) for p in params]
            parts = torch.tensor(knobs, dtype=torch.float64).view(torch.int64), torch.tensor(seeds, dtype=torch.int64)
            self._numbers = torch.cat([part.flatten() for part in parts])
        self._numbers[4 * rows + 1 :: 2] = torch.tensor(positions)
        self._staging.send(self._numbers)
        sent = self._staging.device
        knobs_sent, seeds_sent = sent[: 4 * rows].view(torch.float64).view(rows, 4), sent[4 * rows : 6 * rows]
        return choose_tokens(logits, knobs_sent, seeds_sent.view(rows, 2), self._arrived)

    def edit(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        masks: Mapping[int, Bits],
        table_rows: Mapping[int, int],
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Mask and penalize rows of `logits` [rows, vocab] float32 in place (`kernels.logit_edits.reference`).

        Args:
            masks: those of rows that have one.
            table_rows: the row of `tables` for rows that have penalties.
            tables: bool and int32 [rows, vocab]: what is in the prompt, and counts in the output. None: no penalties.
        """
        rows = sorted({*masks, *table_rows})
        if not rows:
            return
        order = {row: number for number, row in enumerate(masks)}
        places = [(row, table_rows.get(row, -1), order.get(row, -1)) for row in rows]
        asked = (params[row] for row in rows)
        knobs = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in asked]
        edits = torch.cat([torch.tensor(places), torch.tensor(knobs, dtype=torch.float64).view(torch.int64)], dim=1)
        self._edits.send(edits.flatten())
        in_prompt, output_counts = tables or self._no_tables
        edit_logits(
            logits,
            self._edits.device[: edits.numel()].view_as(edits),
            self._sent_words([*masks.values()]),
            in_prompt,
            output_counts,
        )

    def _sent_words(self, masks: Sequence[Bits]) -> torch.Tensor:
        """Send masks to the device; return them as int32 [masks, words]."""
        if masks:
            held = np.zeros((len(masks), self._num_staged * _STAGED_BITS // 8), dtype=np.uint8)
            for line, bits in zip(held, masks, strict=True):
                # The grammar's tokenizer may know more tokens than there are logits, or fewer.
                line[: len(bits)] = bits[: len(line)]
            self._words.send(torch.from_numpy(held.reshape(-1).view(np.int64)))
        return self._words.device.view(torch.int32).view(-1, self._num_staged * (_STAGED_BITS // WORD_BITS))

    def tell(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
        """Return what `kernels.token_logprobs.reference.tell` does."""
        num_top = min(num_top, logits.shape[1])
        return (reference.tell if num_top > MAX_TOP else tell)(logits, token_ids, num_top)

    def fetch(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying numbers to the host; return a function that waits for them."""
        return self._runtime.fetch(numbers)


def _logarithm(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf


def _signed(seed: int) -> int:
    """Return the low 64 bits of a seed as a signed number."""
    return (seed + _HALF) % (2 * _HALF) - _HALF
