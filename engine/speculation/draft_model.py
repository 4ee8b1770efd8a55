"""A small model that continues texts for a large one, which verifies the draft in its next step.

    text      t0 ........................ t9                       of one request, read up to its last token
    draft                                    d1   d2   d3          a step for each, all texts together
    verified                                 d1   d2   x           the text continues with x; d3 is forgotten

It reads each text once, into a cache of its own. Its draws have the request's parameters, seed and positions. Since the
large model's draws have the same noise (`engine.sampling.draws`), both tend to draw the same token at a temperature,
too. Source: speculative decoding (Leviathan et al., 2023, arXiv 2211.17192), verified by equality instead of by
rejection, because a draw here is a function of (seed, position).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as counter
from itertools import takewhile

from adapters.identity import AdapterDigest
from adapters.weights import AdapterWeights
from engine.config import ResolvedConfig
from engine.errors import EngineError
from engine.ports import DraftText
from engine.request import Request, RequestId
from engine.runner import Runner
from engine.step import StepPlan, StepRow
from kernels.program import PauseFlag

CATCH_UP_TOKENS = 32
"""A text with at most this many unread tokens is continued at once; of others, a part is read first."""
FIRST_READ_TOKENS = 64
"""Size of the first part that is read, from which the cost of reading is learned."""
MAX_NEW_TOKENS = 2
"""Unread tokens of a text whose last draft was verified in the step before: one drawn, and at most one right guess."""
NEW_SHARE = 0.1
"""Weight of the newest step in the measured costs."""
DOUBT = 0.998
"""Factor on the measured cost of a draft whenever one is declined: it is not measured then, and may be too high."""


@dataclass(slots=True, eq=False)
class _Reading:
    """What the model has read of a text.

    Attributes:
        source: the request as the large model has it; `request` as this one has it.
        row: index in the runner's buffers.
        tables: a list of blocks for each table of the cache's layout.
        num_read: tokens at the beginning of the text whose keys are in the cache.
        draft_ids: the newest draft, which began at position `drafted_at`.
    """

    source: Request
    request: Request
    row: int
    tables: list[list[int]]
    num_read: int = 0
    draft_ids: list[int] = field(default_factory=list)
    drafted_at: int = 0

    def follow(self, output_ids: Sequence[int]) -> int:
        """Take over what the text has become; return its length in tokens."""
        num_prompt = len(self.request.prompt_ids)
        num_tokens = num_prompt + len(output_ids)
        if self.draft_ids:
            pairs = zip(output_ids[self.drafted_at - num_prompt :], self.draft_ids, strict=False)
            num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.num_read = min(self.num_read, self.drafted_at + num_right)
            self.draft_ids = []
        # The last token's logits are needed.
        self.num_read = min(self.num_read, num_tokens - 1)
        return num_tokens


@dataclass(slots=True, eq=False)
class _Line:
    """A text while it is drafted.

    Attributes:
        output_ids: the answer so far, and the draft.
        num_tokens: length of the text without the draft.
    """

    reading: _Reading
    output_ids: list[int]
    draft: list[int]
    num_tokens: int

    @property
    def end(self) -> int:
        """Length of the text with the draft."""
        return self.num_tokens + len(self.draft)

    def row(self, end: int, *, is_first: bool, samples: bool) -> StepRow:
        """Return the row of a step that reads up to `end`; the first of a draft sets up the row's sampling."""
        return StepRow(
            row=self.reading.row,
            is_admission=is_first,
            request=self.reading.request,
            output_ids=self.output_ids,
            start=self.reading.num_read,
            end=end,
            block_tables=self.reading.tables,
            samples=samples,
        )


def no_weights(digest: AdapterDigest) -> AdapterWeights:
    """Raise EngineError: the draft model computes the base model's texts for all adapters."""
    raise EngineError(f"a draft model has no adapters, and {digest} is asked of it")


class DraftModel:
    """An `engine.ports.Drafting`, on a device that computes synchronously.

    Args:
        config: of the small model; it has a row for each text that can be drafted at once.
        runner: owns the small model and its cache.
        vocab_size: of the large model; the small one may have more tokens, or fewer.
        pause_wish: if it is set, somebody waits for the engine, and a draft ends early.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        vocab_size: int,
        *,
        pause_wish: PauseFlag | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.vocab_size is not None
        self.max_texts = config.max_num_seqs
        self.max_tokens = config.max_model_len
        self.token_s = 0.0
        self._config = config
        self._runner = runner
        self._known_ids = min(vocab_size, config.vocab_size)
        self._pause_wish = pause_wish or threading.Event()
        self._clock = clock
        self._read_token_s = 0.0
        self._step_ids = counter(1)
        self._free_rows = [*range(config.max_num_seqs)]
        self._released_rows: list[int] = []
        self._free_blocks = [*range(config.num_blocks)]
        # Least recently used first.
        self._reading_by_id: OrderedDict[RequestId, _Reading] = OrderedDict()

    def draft(self, texts: Sequence[DraftText], count: int, read_s: float) -> list[list[int]]:
        """Return a draft for each text: see `engine.ports.Drafting`."""
        assert len(texts) <= self.max_texts, "more texts than rows"
        drafts: list[list[int]] = [[] for _ in texts]
        ready: list[_Line] = []
        behind: list[_Line] = []
        held = {text.request.request_id for text in texts}
        for text, draft in zip(texts, drafts, strict=True):
            reading = self._open(text, held)
            if reading is None:
                continue
            num_tokens = reading.follow(text.output_ids)
            if not self._try_extend(reading, num_tokens + count, held):
                continue
            entry = _Line(reading, [*text.output_ids], draft, num_tokens)
            (ready if num_tokens - reading.num_read <= CATCH_UP_TOKENS else behind).append(entry)
        if behind:
            self._read(behind[0], read_s)
        lines = ready
        for number in range(count):
            if not lines or (number and self._pause_wish.is_set()):
                break
            lines = self._lengthen(lines, is_first=not number)
        for line in ready:
            line.reading.draft_ids, line.reading.drafted_at = line.draft, line.num_tokens
        return drafts

    def decline(self) -> None:
        """Note that no draft was expected to pay off: see `engine.ports.Drafting`."""
        self.token_s *= DOUBT

    def _lengthen(self, lines: list[_Line], *, is_first: bool) -> list[_Line]:
        """Draw one more token for each draft; return the lines that can go on."""
        rows = [line.row(line.end, is_first=is_first, samples=True) for line in lines]
        drawn = self._run(rows)
        going = []
        for line in lines:
            token_id = drawn.get(line.reading.request.request_id, -1)
            line.reading.num_read = line.end
            if 0 <= token_id < self._known_ids:
                line.output_ids.append(token_id)
                line.draft.append(token_id)
                going.append(line)
        return going

    def _read(self, line: _Line, read_s: float) -> None:
        """Read a part of a text, for about as many seconds."""
        most = int(read_s / self._read_token_s) if self._read_token_s else FIRST_READ_TOKENS
        num_tokens = max(CATCH_UP_TOKENS, min(most, self._config.max_batched_tokens))
        end = min(line.reading.num_read + num_tokens, line.end - 1)
        self._run([line.row(end, is_first=True, samples=False)])
        line.reading.num_read = end

    def _run(self, rows: list[StepRow]) -> dict[RequestId, int]:
        """Compute a step; return the token drawn for each row that did not fail."""
        rows.sort(key=lambda row: row.num_tokens > 1)
        released, self._released_rows = tuple(self._released_rows), []
        plan = StepPlan(step_id=next(self._step_ids), rows=tuple(rows), released_rows=released)
        started_s = self._clock()
        self._runner.submit(plan)
        while self._runner.proceed():
            pass
        result = self._runner.collect()
        self._learn(plan, self._clock() - started_s)
        return {request_id: token_ids[0] for request_id, token_ids in result.token_ids_by_request.items()}

    def _learn(self, plan: StepPlan, took_s: float) -> None:
        """Learn what a guess costs, or reading; steps in between, which catch up with a text, tell neither."""
        if plan.num_tokens <= MAX_NEW_TOKENS * len(plan.rows):
            self.token_s += (NEW_SHARE if self.token_s else 1.0) * (took_s - self.token_s)
        elif plan.num_tokens >= CATCH_UP_TOKENS:
            read_s = took_s / plan.num_tokens
            self._read_token_s += (NEW_SHARE if self._read_token_s else 1.0) * (read_s - self._read_token_s)

    def _open(self, text: DraftText, held: set[RequestId]) -> _Reading | None:
        """Return what was read of a text, now the most recently used; None if it has tokens unknown to the model."""
        request_id = text.request.request_id
        reading = self._reading_by_id.get(request_id)
        if reading is not None and reading.source is not text.request:
            self._forget(request_id)
            reading = None
        if max(text.output_ids, default=0) >= self._known_ids:
            return None
        if reading is None:
            if max(text.request.prompt_ids) >= self._known_ids:
                return None
            if not self._free_rows:
                self._forget(next(other for other in self._reading_by_id if other not in held))
            tables: list[list[int]] = [[] for _ in self._config.windows]
            reading = _Reading(text.request, self._seen(text.request), self._free_rows.pop(), tables)
            self._reading_by_id[request_id] = reading
        self._reading_by_id.move_to_end(request_id)
        return reading

    def _seen(self, request: Request) -> Request:
        """Return a request without what only its own model can do, or what takes long to follow."""
        params = request.params
        plain = replace(
            params,
            logit_bias=tuple(bias for bias in params.logit_bias if bias[0] < self._known_ids),
            allowed_token_ids=tuple(token_id for token_id in params.allowed_token_ids if token_id < self._known_ids),
            grammar=None,
            bad_words=(),
            dry=None,
            lz=None,
            num_logprobs=None,
            num_prompt_logprobs=None,
        )
        return replace(request, params=plain, adapter=None, prior_output_ids=(), prediction_ids=())

    def _try_extend(self, reading: _Reading, num_tokens: int, held: set[RequestId]) -> bool:
        """Take blocks for a text of this length, from others that are not drafted now; False if there are too few."""
        if num_tokens > self.max_tokens:
            return False
        num_missing = -(-num_tokens // self._config.block_tokens) - len(reading.tables[0])
        while len(self._free_blocks) < num_missing * len(reading.tables):
            other = next((other for other in self._reading_by_id if other not in held), None)
            if other is None:
                return False
            self._forget(other)
        for table in reading.tables:
            table.extend(self._free_blocks.pop() for _ in range(num_missing))
        return True

    def _forget(self, request_id: RequestId) -> None:
        reading = self._reading_by_id.pop(request_id)
        self._free_rows.append(reading.row)
        self._released_rows.append(reading.row)
        for table in reading.tables:
            self._free_blocks.extend(table)
