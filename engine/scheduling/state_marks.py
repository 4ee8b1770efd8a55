"""Where to keep snapshots of a request's states, for layers that have a state instead of keys: at likely branch points.

    tokens   0 .......... 96 ........... 176 .. 190 ) .. 256 .... 320 ... 350 )
                                       the prompt ends              the answer so far
    kept                   |              |               ( )       |
        where it leaves others        near that end     replaced by the next: the last multiple of 64

Keys can be read up to any token, but a state holds for one position only and may take the memory of a thousand tokens'
keys. Conversations continue from the end of a prompt, or of an answer if their template repeats it verbatim. Where a
text diverges from the cached texts of others, a third text is likely to diverge from both: a common beginning of many
prompts is computed twice and found from then on. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.cache.prefix_index import BlockName
from engine.cache.snapshots import Snapshots
from engine.config import ResolvedConfig
from engine.request import RequestId
from engine.scheduling.live_request import LiveRequest
from engine.step import Snapshot, StepRow

APART_TOKENS = 64
"""Tokens of recomputation that a state must save to be kept; also the spacing of states within an answer."""
TAIL_TOKENS = 8
"""Tokens at the end of a prompt that later turns may lack: templates open an answer differently than they repeat it."""


class StateMarks:
    """Decides which states are kept, and finds them again.

    Attributes:
        snapshots: the states that are kept.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._block_tokens = config.block_tokens
        self.snapshots = Snapshots(config.num_snapshots)

    def open(self, live: LiveRequest, found: Sequence[BlockName], num_blocks: int) -> None:
        """Record the state from which a request resumes, after the `found` blocks, and the number of cached blocks."""
        live.state_from = self.snapshots.use(found[-1]) if found else None
        live.num_begun = len(found) * self._block_tokens
        live.branch = num_blocks * self._block_tokens

    def take(self, rows: Sequence[StepRow], live_by_id: Mapping[RequestId, LiveRequest]) -> tuple[StepRow, ...]:
        """Return the rows of a step with the states to resume from and the snapshots to write."""
        return tuple(self._marked(row, live_by_id[row.request.request_id]) for row in rows)

    def settle(self, live: LiveRequest, snapshots: Iterable[Snapshot]) -> None:
        """Record that snapshots of a request have been written."""
        for position, place in snapshots:
            name = live.names_of(position // self._block_tokens, self._block_tokens)[-1]
            if self.snapshots.settle(place, name) and position > len(live.request.prompt_ids):
                live.answer_state = name

    def drop_unsettled(self, rows: Iterable[StepRow]) -> None:
        """Free the places written by a finished step whose snapshots were never settled."""
        self.snapshots.give_back([place for row in rows for _, place in row.snapshots])

    def _marked(self, row: StepRow, live: LiveRequest) -> StepRow:
        size = self._block_tokens
        if row.is_admission:
            row = row._replace(state_from=live.state_from)
        # The common case: the row completes no block.
        if row.end // size == row.start // size:
            return row
        taken = [
            Snapshot(position, place)
            for position in self._positions(live, row.start, row.end)
            if (place := self._try_take(live, position)) is not None
        ]
        return row._replace(snapshots=tuple(taken)) if taken else row

    def _positions(self, live: LiveRequest, start: int, end: int) -> list[int]:
        """Return, in order, the positions in (start, end] at which a state is to be kept."""
        size, num_prompt = self._block_tokens, len(live.request.prompt_ids)
        marks, prompt_mark = {live.branch}, max(0, num_prompt - 1 - TAIL_TOKENS) // size * size
        if live.request.pooling is None:
            stride = -(-APART_TOKENS // size) * size
            answer_mark = end // stride * stride
            marks.add(prompt_mark)
            if answer_mark > num_prompt and answer_mark - prompt_mark >= APART_TOKENS:
                marks.add(answer_mark)
        marks = {mark for mark in marks if mark - live.num_begun >= APART_TOKENS}
        return sorted(mark for mark in marks if start < mark <= end)

    def _try_take(self, live: LiveRequest, position: int) -> int | None:
        """Take a place for a state; None if there is none, or the state is kept already."""
        if position <= len(live.request.prompt_ids):
            name = live.names_of(position // self._block_tokens, self._block_tokens)[-1]
            if name in self.snapshots:
                self.snapshots.use(name)
                return None
        elif live.answer_state is not None:
            # The furthest state is worth the most, so only the newest one of an answer is kept.
            self.snapshots.forget(live.answer_state)
            live.answer_state = None
        return self.snapshots.try_take()
