"""Stand-ins for what the pure core talks to: a device whose cache is a dict, and adapters that load by the clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import chain

from adapters.identity import AdapterDigest
from engine.cache import reach
from engine.config import ResolvedConfig
from engine.errors import EngineError
from engine.metrics import StepTimes
from engine.request import Emission, FinishReason, Request, RequestId, SamplingParams, TokenLogprobs
from engine.scheduling.live_request import PENDING
from engine.scheduling.request_bounds import check_request
from engine.scheduling.scheduler import Scheduler
from engine.step import StepPlan, StepResult, StepRow
from tests.engine.scripted_mover import ScriptedMover
from tests.oracles.naive_scheduler import EOS_IDS, VOCAB_SIZE, cell, forced_after, forced_token, next_token, vector

CONFIG = ResolvedConfig(
    model_path="",
    device="cpu",
    dtype="float32",
    num_threads=1,
    max_model_len=64,
    max_num_seqs=4,
    max_batched_tokens=16,
    block_tokens=4,
    num_blocks=64,
    enable_prefix_cache=True,
    max_queued_requests=8,
    max_adapter_rank=8,
    max_device_adapters=2,
    max_host_adapter_bytes=1 << 20,
    vocab_size=VOCAB_SIZE,
)


def a_config(**changes: object) -> ResolvedConfig:
    return replace(CONFIG, **changes)  # type: ignore[arg-type]


def a_request(name: str, prompt: Sequence[int] = (1, 2, 3), **fields: object) -> Request:
    """A greedy request that ends by length unless told otherwise; sampling fields and request fields side by side."""
    of_request = {field.name for field in fields_of(Request)}
    params = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0} | {
        key: value for key, value in fields.items() if key not in of_request
    }
    rest = {key: value for key, value in fields.items() if key in of_request}
    return Request(
        request_id=RequestId(name),
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        **rest,  # type: ignore[arg-type]
    )


class ScriptedGate:
    """Adapters that need `load_steps` ticks after `prepare`, and share `num_slots` slots and one in each lent run."""

    def __init__(
        self, num_slots: int = 2, load_steps: dict[str, int] | None = None, errors: dict[str, str] | None = None
    ) -> None:
        self._num_slots = num_slots
        self._load_steps = load_steps or {}
        self._errors = errors or {}
        self._left: dict[AdapterDigest, int] = {}
        self._resident: list[AdapterDigest] = []
        self._lacks_room = False
        self.runs: list[range] = []
        self.pins: Counter[AdapterDigest] = Counter()
        self.passing: set[AdapterDigest] = set()

    def tick(self) -> None:
        self._left = {digest: left - 1 for digest, left in self._left.items()}

    def prepare(self, digest: AdapterDigest) -> None:
        self._left.setdefault(digest, self._load_steps.get(digest, 0))

    def try_pin(self, digest: AdapterDigest) -> bool:
        if not self._is_loaded(digest):
            return False
        if digest not in self._resident:
            if len(self._resident) == self._num_slots + len(self.runs):
                self._lacks_room = True
                idle = [other for other in self._resident if not self.pins[other]]
                if not idle:
                    return False
                self._resident.remove(idle[0])
            self._resident.append(digest)
        self.pins[digest] += 1
        return True

    def swap_s(self, digest: AdapterDigest) -> float:
        return 0.0 if digest in self._resident else float(self._load_steps.get(digest, 0))

    def waits_for_slot(self, digest: AdapterDigest) -> bool:
        return self._is_loaded(digest) and digest not in self._resident

    def lacked_room(self) -> bool:
        lacked, self._lacks_room = self._lacks_room, False
        return lacked

    def lend(self, run: range) -> None:
        self.runs.append(run)

    def give_back(self) -> range | None:
        if len(self._resident) == self._num_slots + len(self.runs):
            idle = [other for other in self._resident if not self.pins[other]]
            if not idle:
                return None
            self._resident.remove(idle[0])
        return self.runs.pop()

    def unpin(self, digest: AdapterDigest) -> None:
        assert self.pins[digest] > 0, "unpinned more often than pinned"
        self.pins[digest] -= 1

    def error(self, digest: AdapterDigest) -> str | None:
        return self._errors.get(digest)

    def passes(self, digest: AdapterDigest) -> bool:
        return digest in self.passing

    def _is_loaded(self, digest: AdapterDigest) -> bool:
        return self._left.get(digest, 1) <= 0


class ScriptedRunner:
    """A device that computes what a plan says and nothing else: a wrong block table gives wrong tokens.

    Rows see the cache as it was before the step and what they have written themselves. Checks what `StepPlan` promises.

    With `steps_ahead` it is asked for more before it has answered; a pending token is the one that it drew for the row.
    A step pauses as long as `pauses` says so.

    Where states are kept, each row has one, which is the cell before its next position: it must be its own, wherever it
    comes from. A place holds nothing before it is written, and nothing by a row that fails.
    """

    steps_ahead = 0

    def __init__(
        self,
        config: ResolvedConfig,
        gate: ScriptedGate,
        failing: frozenset[str] = frozenset(),
        steps_ahead: int | None = None,
    ) -> None:
        self.times = StepTimes()
        if steps_ahead is not None:
            self.steps_ahead = steps_ahead
        self._last_by_row: dict[int, int] = {}
        self._pooled_by_row: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.dies_at_step: int | None = None
        self._config = config
        self._gate = gate
        self._failing = failing
        self.cells: dict[int, int] = {}
        self._state_by_row: dict[int, int | None] = {}
        self._snapshots: dict[int, int | None] = {}
        self._owner_by_row: dict[int, RequestId] = {}
        self._tables_by_row: dict[int, list[list[int]]] = {}
        self._begun: list[StepPlan] = []
        self._results: deque[StepResult] = deque()
        self.pauses: Callable[[], bool] = lambda: False

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if self.dies_at_step is not None and plan.step_id >= self.dies_at_step:
            raise EngineError("the device is gone")
        self._check_plan(plan)
        self._update_rows(plan)
        for row in plan.rows:
            if row.is_admission:
                self._state_by_row[row.row] = 0 if row.state_from is None else self._snapshots[row.state_from]
        self._begun.append(plan)

    def proceed(self) -> bool:
        if self.pauses():
            return True
        plan = self._begun.pop()
        result = StepResult(token_ids_by_request={}, error_by_request={})
        writes: dict[int, int] = {}
        for row in plan.rows:
            assert self._owner_by_row[row.row] == row.request.request_id, "a row that is computed changed hands"
            own = self._compute(row)
            assert not own.keys() & writes.keys(), "two rows write one slot"
            writes |= own
            self._leave_states(row, own)
            self._pool(row, own, result)
            if row.scores:
                last = min(row.end, len(row.request.prompt_ids) - 1)
                told = [TokenLogprobs(own[self._slots(row, position)[0]]) for position in range(row.start, last)]
                result.prompt_logprobs_by_request[row.request.request_id] = told
            if row.samples and row.request.request_id in self._failing:
                result.error_by_request[row.request.request_id] = "The numbers of this request are not finite."
                self._last_by_row[row.row] = 0
            elif row.samples:
                drawn = self._draw(row, self.cells | own)
                self._last_by_row[row.row] = drawn[0]
                result.token_ids_by_request[row.request.request_id] = tuple(drawn)
        self.cells.update(writes)
        self._results.append(result)
        return False

    def collect(self) -> StepResult:
        return self._results.popleft()

    def idle(self) -> bool:
        return False

    def _leave_states(self, row: StepRow, own: dict[int, int]) -> None:
        """Check the state that a row goes on from, and keep what is to be kept of it."""
        if not self._config.num_snapshots:
            assert not row.snapshots, "a state is kept where there is no room"
            assert row.state_from is None, "a row goes on from a state where none are kept"
            return
        before = self._seen(row, row.start, self.cells)[-1] if row.start else 0
        assert self._state_by_row[row.row] == before, "a row goes on from a state that is not its own"
        has_failed = row.samples and row.request.request_id in self._failing
        positions = [position for position, _ in row.snapshots]
        assert positions == sorted(set(positions)), "states are kept out of order"
        for position, place in row.snapshots:
            assert row.start < position <= row.end, "a state is kept that the row does not come by"
            assert position % self._config.block_tokens == 0, "a state is kept inside of a block"
            assert 0 <= place < self._config.num_snapshots
            self._snapshots[place] = None if has_failed else own[self._slots(row, position - 1)[0]]
        self._state_by_row[row.row] = own[self._slots(row, row.stop - 1)[0]]

    def _pool(self, row: StepRow, own: dict[int, int], result: StepResult) -> None:
        """Gather what the row itself computes, never what lies in the cache."""
        if row.request.pooling is None:
            return
        assert not row.samples, "a token is drawn for who wants a vector"
        gathered = self._pooled_by_row.setdefault(row.row, [])
        gathered += [own[self._slots(row, position)[0]] for position in range(row.end - row.num_pooled, row.end)]
        request_id = row.request.request_id
        if row.ends_prompt and request_id in self._failing:
            result.error_by_request[request_id] = "The numbers of this request are not finite."
        elif row.ends_prompt:
            result.pooled_by_request[request_id] = vector(row.request, gathered)

    def _draw(self, row: StepRow, cells: dict[int, int]) -> list[int]:
        """Draw a token behind the row, and one behind each of its draft that is right."""
        drawn: list[int] = []
        while len(drawn) <= len(row.draft_ids) and drawn == [*row.draft_ids[: len(drawn)]]:
            end = row.end + len(drawn)
            index = end - len(row.request.prompt_ids)
            forced = forced_token(row.request, index)
            seen = self._seen(row, end, cells)
            drawn.append(next_token(row.request, seen) if forced is None else forced)
            if row.request.params.can_jump:
                drawn += forced_after(row.request, index + 1)
        return drawn

    def _compute(self, row: StepRow) -> dict[int, int]:
        own: dict[int, int] = {}
        previous = self._seen(row, row.start, self.cells)[-1] if row.start else 0
        for position, token_id in zip(range(row.start, row.stop), row.token_ids(), strict=True):
            if token_id == PENDING:
                assert (self.steps_ahead, row.num_tokens) == (1, 1), "a pending token where none can be"
                token_id = self._last_by_row[row.row]
            previous = cell(row.request, position, previous, token_id)
            own |= dict.fromkeys(self._slots(row, position), previous)
        return own

    def _seen(self, row: StepRow, end: int, cells: dict[int, int]) -> list[int]:
        """Return what lies before a position, and see to it that each table has of it what its window shows."""
        seen: list[int] = []
        # What is told of the outputs may be ahead of the row.
        known = (*row.request.prompt_ids, *row.output_ids)[: row.end]
        for token_id in (*known, *row.draft_ids)[:end]:
            drawn = self._last_by_row[row.row] if token_id == PENDING else token_id
            seen.append(cell(row.request, len(seen), seen[-1] if seen else 0, drawn))
        for table, window in enumerate(self._config.windows):
            for position in range(max(0, end + 1 - window) if window else 0, end):
                found = cells.get(self._slots(row, position)[table])
                assert found == seen[position], f"what table {table} shows at {position} is gone, or somebody else's"
        return seen

    def _slots(self, row: StepRow, position: int) -> list[int]:
        # From the kept tables, as a real runner does: they must never change under a row, only grow.
        size = self._config.block_tokens
        return [table[position // size] * size + position % size for table in self._tables_by_row[row.row]]

    def _check_plan(self, plan: StepPlan) -> None:
        lent = {block for run in self._gate.runs for block in run}
        for slot in [slot for slot in self.cells if slot // self._config.block_tokens in lent]:
            # An adapter lies there now.
            del self.cells[slot]
        for row in plan.rows:
            assert not lent.intersection(chain(*row.block_tables)), "a row has a block that is lent"
        assert 0 < plan.num_tokens <= self._config.max_batched_tokens
        assert len(plan.rows) <= self._config.num_rows
        assert len({row.row for row in plan.rows}) == len(plan.rows)
        assert sum(row.num_logits for row in plan.rows) <= self._config.num_logits
        places = [place for row in plan.rows for _, place in row.snapshots]
        assert len(set(places)) == len(places), "two rows keep states in one place"
        assert all(row.samples for row in plan.rows if row.draft_ids), "a draft stands before what is known"
        ends = [EOS_IDS.union(row.request.params.stop_token_ids).intersection(row.draft_ids) for row in plan.rows]
        assert not any(ends), "a draft goes on behind an end"
        assert all(
            0 <= row.start < row.end <= row.stop <= len(blocks) * self._config.block_tokens
            for row in plan.rows
            for blocks in row.block_tables
        )
        groups = [(row.num_tokens > 1, row.request.adapter or "") for row in plan.rows]
        assert groups == sorted(groups), "rows are out of order"
        assert all(row.request.adapter is None or self._gate.pins[row.request.adapter] for row in plan.rows), (
            "an adapter is not pinned"
        )
        cap = self._config.max_prefill_tokens_with_decodes
        # Whoever wants one token more is a decode to the plan, the last one of a prompt for a vector included.
        last = [row for row in plan.rows if row.end - row.start == 1 and (row.samples or row.ends_prompt)]
        if cap is not None and not all(row.is_admission for row in last):
            forced = [row for row in plan.rows if row not in last and row.start >= len(row.request.prompt_ids)]
            num_decoded = sum(row.num_tokens for row in [*last, *forced])
            assert plan.num_tokens - num_decoded <= cap, "prefills hold up decodes"

    def _update_rows(self, plan: StepPlan) -> None:
        for index in plan.released_rows:
            self._owner_by_row.pop(index, None)
        for row in plan.rows:
            tables = self._tables_by_row.setdefault(row.row, [])
            if row.is_admission:
                owner = self._owner_by_row.setdefault(row.row, row.request.request_id)
                assert owner == row.request.request_id, "a row is given away twice"
                self._pooled_by_row.pop(row.row, None)
                tables[:] = [list(blocks) for blocks in row.block_tables]
            assert self._owner_by_row[row.row] == row.request.request_id, "a row changed hands without admission"
            held: list[int] = []
            for table, blocks, window in zip(tables, row.block_tables, self._config.windows, strict=True):
                # By the definition: kernels read whole tiles, from that of the first position that the row sees.
                tile = max(0, row.start - window + 1) // reach.TILE_TOKENS * reach.TILE_TOKENS if window else 0
                first = tile // self._config.block_tokens
                # What was not seen as the row was given away was never there: the null block is read as nothing.
                while first < len(table) and table[first] == self._config.num_blocks:
                    first += 1
                assert list(blocks[first : len(table)]) == table[first:], "a block table changed under a row"
                table += blocks[len(table) :]
                held += [block for block in blocks if block != self._config.num_blocks]
            assert len(set(held)) == len(held), "a block stands twice in one row's tables"


class Harness:
    """A scheduler on a scripted device, and what came out for each request."""

    def __init__(
        self,
        config: ResolvedConfig = CONFIG,
        gate: ScriptedGate | None = None,
        failing: frozenset[str] = frozenset(),
        clock: Callable[[], float] = lambda: 0.0,
        steps_ahead: int = 0,
        mover: ScriptedMover | None = None,
    ) -> None:
        self.config = config
        self.gate = gate or ScriptedGate()
        self.runner = ScriptedRunner(config, self.gate, failing, steps_ahead)
        self.mover = mover
        if mover is not None:
            mover.cells, mover.block_tokens = self.runner.cells, config.block_tokens
        self.under_way: deque[StepPlan] = deque()
        self.scheduler = Scheduler(config, self.gate, EOS_IDS, clock, mover)
        self.emissions: dict[str, list[Emission]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            check_request(request, self.config)
            self.scheduler.add(request)
            self.emissions[request.request_id] = []
        self.scheduler.check()

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(RequestId(name))
        self.scheduler.check()

    def step(self) -> StepPlan | None:
        """One step of the engine's loop, checked on every side."""
        emissions: list[Emission] = []
        if self.under_way and self.under_way[-1].needs_results:
            emissions = self._commit()
        if self.mover is not None:
            self.mover.tick()
        plan = self.scheduler.plan()
        self.scheduler.check()
        self.gate.tick()
        if plan is None:
            assert self.under_way or not self.scheduler.num_running, "a request runs, and nothing is planned"
        else:
            self.runner.submit(plan)
            self.scheduler.advance(plan)
            self.under_way.append(plan)
            while self.runner.proceed():
                emissions += self._serve_newcomers()
        if len(self.under_way) > (0 if plan is None else self.runner.steps_ahead):
            emissions += self._commit()
        else:
            emissions += self.scheduler.drain()
        self.scheduler.check()
        self._take(emissions)
        return plan

    def _serve_newcomers(self) -> list[Emission]:
        """What goes before the step that has paused."""
        plan = self.scheduler.plan_newcomers()
        self.scheduler.check()
        if plan is None:
            return []
        self.runner.submit(plan)
        self.scheduler.advance(plan)
        while self.runner.proceed():
            pass
        emissions = self.scheduler.commit(plan, self.runner.collect())
        self.scheduler.check()
        return emissions

    def _take(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            seen = self.emissions[emission.request_id]
            assert not seen or seen[-1].finish_reason is None, "something follows the end"
            assert emission.token_ids or emission.finish_reason is not None, "an empty emission"
            seen.append(emission)

    def _commit(self) -> list[Emission]:
        return self.scheduler.commit(self.under_way.popleft(), self.runner.collect())

    def finish(self, max_steps: int = 2000) -> int:
        """Step until every request has ended; returns the number of steps."""
        for count in range(max_steps):
            if all(self.reason(name) is not None for name in self.emissions):
                self.check_all_returned()
                return count
            self.step()
        raise AssertionError(f"requests are starved: {[n for n in self.emissions if self.reason(n) is None]}")

    def check_all_returned(self) -> None:
        while self.under_way:
            assert self.scheduler.commit(self.under_way.popleft(), self.runner.collect()) == []
        while self.mover is not None and self.scheduler.kv_usage:
            # What was fetched for somebody who has ended meanwhile.
            self.step()
        self.scheduler.check()
        states = self.scheduler._tables._states
        assert states is None or not states.snapshots._written, "a place is written by nobody"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.kv_usage == 0
        assert not +self.gate.pins, "an adapter is still pinned"

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token_id for emission in self.emissions[name] for token_id in emission.token_ids)

    def pooled(self, name: str) -> bytes | None:
        return self.emissions[name][-1].pooled if self.emissions[name] else None

    def reason(self, name: str) -> FinishReason | None:
        return self.emissions[name][-1].finish_reason if self.emissions[name] else None
