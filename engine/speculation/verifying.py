"""Draws tokens after the draft tokens, position by position, as long as a draft was right.

    draft           d1    d2    d3
    logits    l0    l1    l2    l3
    drawn     d1    d2    x                  the answer continues with d1 d2 x; l3 belongs to another text

A draw is a function of (seed, position), and all else that it depends on (penalties, a grammar, counts) has been
updated with the tokens before it. So each token is the one that would have been drawn in a step of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.request import TokenLogprobs
from engine.sampling.sampler import Sampler, SampleResult
from engine.step import StepRow


@dataclass(slots=True)
class RowTokens:
    """The tokens drawn for a row so far."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, row: int, token_id: int, drawn: SampleResult) -> None:
        """Add a drawn token and those that the row's grammar forces after it."""
        self.token_ids += [token_id, *drawn.forced.get(row, ())]
        if row in drawn.logprobs:
            self.logprobs.append(drawn.logprobs[row])


def draw_behind(
    sampler: Sampler, logits: torch.Tensor, lines: Sequence[int], rows: Sequence[StepRow], drawn: SampleResult
) -> list[RowTokens]:
    """Return the tokens of each row, the first of which is in `drawn`; those of a failed row are meaningless.

    Args:
        logits: logits of the whole step.
        lines: line of `logits` at which each row begins.
    """
    found = [RowTokens([]) for _ in rows]
    for tokens, row, token_id in zip(found, rows, drawn.token_ids, strict=True):
        tokens.add(row.row, token_id, drawn)
    while True:
        right = [index for index, row in enumerate(rows) if _is_right(found[index].token_ids, row.draft_ids)]
        if not right:
            return found
        nexts = [len(found[index].token_ids) for index in right]
        drawn = sampler.sample(
            logits[[lines[index] + count for index, count in zip(right, nexts, strict=True)]],
            [rows[index].row for index in right],
            [rows[index].end + count for index, count in zip(right, nexts, strict=True)],
        )
        for index, token_id in zip(right, drawn.token_ids, strict=True):
            # A row that fails here keeps its tokens so far, and fails again in the next step.
            if token_id < 0:
                rows = [*rows[:index], rows[index]._replace(draft_ids=()), *rows[index + 1 :]]
            else:
                found[index].add(rows[index].row, token_id, drawn)


def _is_right(token_ids: Sequence[int], draft_ids: tuple[int, ...]) -> bool:
    """Whether all tokens so far were drafted, so that there are logits for the next one."""
    return len(token_ids) <= len(draft_ids) and tuple(token_ids) == draft_ids[: len(token_ids)]
