"""Choose one token for each row of logits. Works on token ids only: no text, no stop strings.

The order is that of transformers:

       log-probabilities      of the unedited logits
    1. bias and masks         logit_bias, bad words, ends before min_tokens, allowed ids, grammar
       penalties              repetition (prompt and output), then frequency and presence (output), DRY, LZ
       temperature 0:         argmax, and nothing below
    2. temperature
    3. top-n-sigma -> top-k -> top-p -> min-p -> typical-p -> epsilon -> eta -> XTC
    4. the draw               `kernels.token_choice.reference`: a function of (seed, position)

Only what some row asks for is computed: an all-greedy batch is one argmax over the vocabulary. A row's token does not
depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.placing import placed
from engine.request import Request, SamplingParams, TokenLogprobs
from engine.sampling.draws import draw_keys, read_told, scale, uniforms
from engine.sampling.edits import LogitEdits
from engine.sampling.grammar import GrammarFollower, GrammarStore
from engine.sampling.lineup import Lineup, RowState
from engine.sampling.masks import mask
from engine.sampling.repeats import RepeatPenalties
from engine.sampling.truncation import (
    Candidates,
    exclude_top_choices,
    keep_epsilon,
    keep_eta,
    keep_min_p,
    keep_top_n_sigma,
    keep_top_p,
    keep_typical,
    select_top_k,
)
from kernels.logit_edits.reference import penalize
from kernels.token_choice.reference import DrawKeys, gumbel_noise, gumbel_noise_of_all, race
from kernels.token_logprobs.reference import tell

if TYPE_CHECKING:
    from engine.gpu.choosing import TokenChooser

NOT_FINITE = "The model computed no finite numbers for this request."
ROWS_AT_ONCE = 16
"""Rows, or a quarter of all, that are truncated and drawn by torch's operators at once.

They take up to 22 times the memory of their logits.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The tokens that one call of `Sampler.sample` chose.

    Attributes:
        token_ids: one for each row asked, in order; -1 where that row failed.
        failed: one sentence for each failed row, by its row index as passed in `rows`.
        unfollowable: the failed rows whose grammar is in error.
        logprobs: of the chosen tokens, by row index, for rows that ask for them.
        forced: tokens that the row's grammar forces next, by row index; they are output as well.
    """

    token_ids: list[int]
    failed: dict[int, str] = field(default_factory=dict)
    unfollowable: frozenset[int] = frozenset()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    forced: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Tokens that a device has been asked to choose.

    Attributes:
        lineup: the rows.
        token_ids: int64 on the device, one for each line, -1 where a row failed; usable there without waiting.
        fetched: waits for the token ids and returns them.
        fetched_told: waits for what `kernels.token_logprobs.reference.tell` returns; None if no row asks.
    """

    lineup: Lineup
    token_ids: torch.Tensor
    fetched: Callable[[], torch.Tensor]
    fetched_told: Callable[[], torch.Tensor] | None


class Sampler:
    """Sampling state of the runner's rows.

    Penalty tables ([num_rows, vocab], a bool and an int32) are allocated when the first request asks for penalties.

    Args:
        choose: the device's implementation of sampling; None for torch operators.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        eos_ids: Sequence[int],
        grammars: GrammarStore | None = None,
        choose: TokenChooser | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._choose = choose
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._eos_ids = tuple(eos_ids)
        self._state_by_row: dict[int, RowState] = {}
        self._lineup: Lineup | None = None
        self._in_prompt: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    def admit(self, row: int, request: Request, output_ids: Sequence[int]) -> None:
        """Assign a row to a request, maybe the one that has it.

        Args:
            output_ids: all tokens that it has generated so far, here or elsewhere.
        """
        params = request.params
        follower = None
        if params.grammar is not None:
            assert self._grammars is not None
            follower = self._grammars.follow(params.grammar, output_ids)
        stop_ids = {*self._eos_ids, *params.stop_token_ids}
        before = self._state_by_row.get(row)
        self._lineup = None
        self._state_by_row[row] = RowState(
            params=params,
            prompt_ids=request.prompt_ids,
            stop_ids=tuple(sorted(i for i in stop_ids if 0 <= i < self._vocab_size)),
            edits=LogitEdits.of(params, self._vocab_size, output_ids),
            follower=follower,
            repeats=RepeatPenalties.of(request, self._vocab_size, output_ids),
        )
        if params.has_penalties:
            in_prompt, output_counts = self._penalty_tables()
            # A draft model admits a request again for each draft: reading a long prompt takes many times longer.
            if before is None or not before.params.has_penalties or before.prompt_ids is not request.prompt_ids:
                in_prompt[row] = False
                in_prompt[row].index_fill_(0, placed(request.prompt_ids, self._device), True)
            outputs = placed(output_ids, self._device)
            output_counts[row] = 0
            output_counts[row].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def release(self, row: int) -> None:
        """Forget a row; idempotent."""
        self._state_by_row.pop(row, None)
        self._lineup = None

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> SampleResult:
        """Choose a token for each row and count it as that row's output: `draw`, then `finish`."""
        return self.finish(self.draw(logits, rows, positions))

    def draw(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> Drawing:
        """Enqueue the choice of a token for each row, and count it on the device as that row's output.

        The draw of a row that `is_followed` must be finished before the row's next draw.

        Args:
            logits: [n, vocab] float32 on the sampler's device; may be overwritten.
            rows: the admitted row of each line of `logits`; distinct.
            positions: position of each new token.
        """
        lineup = self._line_up(rows)
        states, params, told = lineup.states, lineup.params, lineup.told
        as_they_came = logits[placed(told, self._device)] if told else None
        if lineup.biased is not None:
            logits.view(-1).index_add_(0, *lineup.biased)
        self._forbid(logits, lineup, positions)
        self._mask_and_penalize(logits, lineup)
        for line in lineup.repeated:
            repeats = states[line].repeats
            assert repeats is not None
            repeats.apply(logits[line])
        token_ids = (_likeliest if self._choose is None else self._choose)(logits, params, positions)
        if lineup.groups:
            is_usable = token_ids >= 0
            for width, lines in lineup.pieces(max(ROWS_AT_ONCE, len(params) // 4)):
                index = placed(lines, self._device)
                group = [params[line] for line in lines]
                token_ids[index] = _draw(logits[index], group, [positions[line] for line in lines], width)
            token_ids = torch.where(is_usable, token_ids, -1)
        self._count(lineup, token_ids)
        fetched_told = None
        if as_they_came is not None:
            num_top = max(params[line].num_logprobs or 0 for line in told)
            chosen_ids = token_ids[placed(told, self._device)].clamp(min=0)
            fetched_told = self.tell(as_they_came, chosen_ids, num_top)
        return Drawing(
            lineup=lineup,
            token_ids=token_ids,
            fetched=self.fetch(token_ids),
            fetched_told=fetched_told,
        )

    def finish(self, drawing: Drawing) -> SampleResult:
        """Wait for the tokens, update the state of rows that depends on them, and take forced tokens."""
        lineup = drawing.lineup
        rows, states = lineup.rows, lineup.states
        token_ids: list[int] = drawing.fetched().tolist()
        failed: dict[int, str] = {}
        if min(token_ids, default=0) < 0:
            failed = {row: NOT_FINITE for row, token_id in zip(rows, token_ids, strict=True) if token_id < 0}
        forced: dict[int, list[int]] = {}
        for line in lineup.followed:
            row, state, token_id = rows[line], states[line], token_ids[line]
            if token_id < 0:
                continue
            if state.edits is not None:
                state.edits.note(token_id)
            if state.repeats is not None:
                state.repeats.note([token_id])
            if state.follower is not None:
                state.follower.note(token_id)
                if state.params.can_jump and token_id not in state.stop_ids:
                    forced[row] = self._take_forced(row, state, state.follower)
        unfollowable = _take_errors(lineup, token_ids, failed)
        logprobs: dict[int, TokenLogprobs] = {}
        if drawing.fetched_told is not None:
            for line, entry in zip(lineup.told, read_told(drawing.fetched_told()), strict=True):
                logprobs[rows[line]] = entry._replace(top=entry.top[: states[line].params.num_logprobs])
        return SampleResult(
            token_ids=token_ids, failed=failed, unfollowable=unfollowable, logprobs=logprobs, forced=forced
        )

    def _line_up(self, rows: Sequence[int]) -> Lineup:
        if self._lineup is None or self._lineup.rows != rows:
            states = [self._state_by_row[row] for row in rows]
            self._lineup = Lineup(rows, states, self._vocab_size, self._device, has_simple=self._choose is None)
        return self._lineup

    def _take_forced(self, row: int, state: RowState, follower: GrammarFollower) -> list[int]:
        forced = follower.take_forced()
        if state.repeats is not None:
            state.repeats.note(forced)
        if forced and state.params.has_penalties:
            ids = placed(forced, self._device)
            self._penalty_tables()[1][row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return forced

    def _mask_and_penalize(self, logits: torch.Tensor, lineup: Lineup) -> None:
        if self._choose is not None:
            masks = {line: lineup.states[line].allowed() for line in lineup.masked}
            tables = self._penalty_tables() if lineup.penalized else None
            self._choose.edit(
                logits, lineup.params, masks, {line: lineup.rows[line] for line in lineup.penalized}, tables
            )
            return
        for line in lineup.masked:
            mask(logits[line], lineup.states[line].allowed())
        if lines := lineup.penalized:
            in_prompt, output_counts = self._penalty_tables()
            index = placed(lines, self._device)
            table_rows = placed([lineup.rows[line] for line in lines], self._device)
            params = [lineup.params[line] for line in lines]
            logits[index] = penalize(
                logits[index],
                in_prompt[table_rows],
                output_counts[table_rows],
                repetition=_column([p.repetition_penalty for p in params], self._device),
                frequency=_column([p.frequency_penalty for p in params], self._device),
                presence=_column([p.presence_penalty for p in params], self._device),
            )

    def _forbid(self, logits: torch.Tensor, lineup: Lineup, positions: Sequence[int]) -> None:
        """Mask single tokens: what would complete a bad word, and what would end an answer too soon."""
        states = lineup.states
        forbidden: list[tuple[int, int]] = []
        for line in lineup.worded:
            edits = states[line].edits
            assert edits is not None
            forbidden += [(line, token_id) for token_id in edits.forbidden()]
        for line in lineup.delayed:
            if positions[line] - len(states[line].prompt_ids) < lineup.params[line].min_tokens:
                forbidden += [(line, token_id) for token_id in states[line].stop_ids]
        if forbidden:
            at = placed(forbidden, self._device)
            # Subtract, so that NaN stays visible to the check for finite numbers.
            logits[at[:, 0], at[:, 1]] -= torch.inf

    def _count(self, lineup: Lineup, token_ids: torch.Tensor) -> None:
        """Count tokens for penalties on the device: the next draw may come before the host knows these tokens."""
        lines = lineup.penalized
        if lines:
            table_rows = placed([lineup.rows[line] for line in lines], self._device)
            drawn = token_ids[placed(lines, self._device)]
            self._penalty_tables()[1][table_rows, drawn.clamp(min=0)] += (drawn >= 0).int()

    def tell(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Callable[[], torch.Tensor]:
        """Start computing what `kernels.token_logprobs.reference.tell` returns; return a function that waits for it."""
        return self.fetch((tell if self._choose is None else self._choose.tell)(logits, token_ids, num_top))

    def fetch(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying numbers to the host; return a function that waits for them, but for nothing enqueued later."""
        return (lambda: numbers) if self._choose is None else self._choose.fetch(numbers)

    def _penalty_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._in_prompt is None or self._output_counts is None:
            shape = (self._num_rows, self._vocab_size)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._output_counts


def _take_errors(lineup: Lineup, token_ids: list[int], failed: dict[int, str]) -> frozenset[int]:
    """Fail the rows whose grammar is in error, whatever token they drew, and return their indices."""
    unfollowable = set()
    for line in lineup.followed:
        row, state = lineup.rows[line], lineup.states[line]
        error = None if state.follower is None else state.follower.error
        if error is None:
            continue
        token_ids[line] = -1
        failed[row] = error
        unfollowable.add(row)
    return frozenset(unfollowable)


def _likeliest(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """Return the likeliest token of each row, -1 if its maximum is not finite: NaN and infinity propagate to it."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorized, torch's is not.
        chosen = torch.from_numpy(logits.numpy().argmax(axis=-1))
        highest = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    else:
        highest, chosen = logits.max(dim=-1)
    return torch.where(highest.isfinite(), chosen, -1)


def _draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int], width: int) -> torch.Tensor:
    """Draw a token id (int64, [n]) for rows that all sort `width` candidates, 0 for none."""
    device = logits.device
    scores = scale(logits, _column([p.temperature for p in params], device))
    if any(p.top_n_sigma > 0 for p in params):
        scores = keep_top_n_sigma(scores, _column([p.top_n_sigma or torch.inf for p in params], device))
    candidates = Candidates(scores=scores, token_ids=None) if width == 0 else select_top_k(scores, width)
    scores = candidates.scores
    if any(p.top_p < 1 for p in params):
        scores = keep_top_p(scores, _column([p.top_p if p.top_p < 1 else torch.inf for p in params], device))
    if any(p.min_p > 0 for p in params):
        scores = keep_min_p(scores, _column([p.min_p for p in params], device))
    keys = draw_keys([p.seed for p in params], positions, device)
    scores = _shortened(scores, params, keys)
    if candidates.token_ids is None:
        return race(scores, gumbel_noise_of_all(keys, scores.shape[1]))
    winners = race(scores, gumbel_noise(keys, candidates.token_ids))
    return candidates.token_ids.gather(1, winners.unsqueeze(1)).squeeze(1)


def _shortened(scores: torch.Tensor, params: list[SamplingParams], keys: DrawKeys) -> torch.Tensor:
    device = scores.device
    if any(p.typical_p < 1 for p in params):
        scores = keep_typical(scores, _column([p.typical_p for p in params], device))
    if any(p.epsilon_cutoff > 0 for p in params):
        scores = keep_epsilon(scores, _column([p.epsilon_cutoff for p in params], device))
    if any(p.eta_cutoff > 0 for p in params):
        scores = keep_eta(scores, _column([p.eta_cutoff for p in params], device))
    if any(p.xtc_probability > 0 for p in params):
        threshold = _column([p.xtc_threshold for p in params], device)
        probability = _column([p.xtc_probability for p in params], device)
        scores = exclude_top_choices(scores, threshold, probability, uniforms(keys))
    return scores


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    """Return the values as a float32 column [rows, 1]."""
    return placed(values, device, torch.float32).unsqueeze(1)
