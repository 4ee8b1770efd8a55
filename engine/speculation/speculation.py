"""Chooses which rows of a step also compute draft tokens, and how many. Pure: standard library only.

Draft tokens are computed after a row's last token. The answer takes them as long as they equal what would have been
drawn; the rest is overwritten. The number of draft tokens is chosen to make the tokens of the step come sooner, from
the request's acceptance rate and measured step costs: the i-th token of a draft is right with probability p^i, and is
computed while

    p^i * (seconds of the step so far)  >  seconds of one more token * (expected tokens of the step so far)

the likeliest of all rows first. An accepted token would otherwise have been computed in a later step, beside the same
other rows. So other rows lose only the time of rejected tokens and, once, that of a longer step, which is bounded.
Drafts use only what is left of the budget, and blocks that no request needs.

A draft model (`engine.ports.Drafting`) is asked where it is more often right than what was looked up. Its tokens take
time before the step, so they are chosen together, one more for each request, while this brings more tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from adapters.identity import AdapterDigest
from engine.config import ResolvedConfig
from engine.metrics import SchedulerCounters
from engine.ports import Drafting, DraftText
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.live_request import LiveRequest
from engine.scheduling.step_costs import StepCosts
from engine.scheduling.step_draft import StepDraft
from engine.speculation.drafter import Drafter
from engine.step import StepRow

MAX_STRETCH = 0.5
"""Share by which drafts may lengthen a step; more only if every row can expect more tokens in proportion."""
FIRST_GUESSES = 2
"""Tokens to draft while the cost of a draft model is not known."""
FIRST_AGREEMENT = 0.7
"""Acceptance rate of a draft model that is assumed before anything is known."""
NEW_SHARE = 0.2
"""Weight of the newest step in it."""
FORGOTTEN = 0.02
"""Share by which each new answer returns to the first assumption: where nothing is guessed, nothing is learned."""
MAX_ADAPTERS = 4096


class Speculation:
    """Speculative decoding of one engine; off if the configuration allows no draft tokens.

    Args:
        model: the draft model; None if there is none.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        eos_ids: Iterable[int],
        costs: StepCosts,
        counters: SchedulerCounters,
        model: Drafting | None,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._eos_ids = frozenset(eos_ids)
        self._costs = costs
        self._counters = counters
        self._model = model
        self._clock = clock
        self._agreement = Agreement()

    @property
    def is_on(self) -> bool:
        """Whether drafts are enabled."""
        return self._config.num_speculative_tokens > 0

    def extend(self, step: StepDraft, tables: BlockTables, num_running: int) -> None:
        """Add draft tokens to a step that is otherwise complete.

        Args:
            num_running: running requests; this many blocks per table stay free for their next step.
        """
        decoding = step.decoding() if self.is_on and self._costs.has_decode_steps else []
        if not decoding or not step.num_free:
            return
        step_s = self._costs.step_s(len(decoding)) + self._costs.prompt_s(step.num_prompt_tokens, step.num_pairs)
        offers = [
            Offer(live, draft, self._drafter(live).acceptance) for live in decoding if (draft := self._offer(live))
        ]
        if self._model is not None and len(decoding) <= self._model.max_texts:
            started_s = self._clock()
            offers = self._with_guesses(offers, decoding, self._model, step_s, step.num_free)
            step.drafting_s = self._clock() - started_s
        share_out(offers, step_s, self._costs.draft_token_s, num_rows=len(decoding), num_free=step.num_free)
        for offer in offers:
            count = offer.num_wanted
            count = tables.extend_beyond(offer.live, count, spare=num_running) if count else 0
            if count:
                step.put_draft(offer.live, offer.draft_ids[:count])

    def commit(self, live: LiveRequest, row: StepRow, token_ids: tuple[int, ...], tables: BlockTables) -> int:
        """Count the accepted tokens of a row's draft as computed, given the row's new tokens; return their number."""
        if not row.draft_ids:
            return 0
        num_right = 0
        # The last token is only drawn, not computed.
        for token_id, drafted in zip(token_ids[:-1], row.draft_ids, strict=False):
            if token_id != drafted:
                break
            num_right += 1
        live.num_computed += num_right
        tables.settle(live, row.end, live.num_computed)
        drafter = self._drafter(live)
        drafter.note(len(row.draft_ids), num_right)
        if drafter.has_guessed:
            self._agreement.learn(live.request.adapter, drafter.guesses.acceptance)
        self._counters.num_drafts += 1
        self._counters.num_draft_tokens += len(row.draft_ids)
        self._counters.num_accepted_tokens += num_right
        return num_right

    def _offer(self, live: LiveRequest) -> list[int]:
        count = self._most(live)
        return [] if count < 1 else self._drafter(live).look_up(live.output_ids, count, self._stop_ids(live))

    def _with_guesses(
        self, offers: list[Offer], decoding: Sequence[LiveRequest], model: Drafting, step_s: float, num_free: int
    ) -> list[Offer]:
        """Return the offers, replacing those that the draft model is expected to beat."""
        acceptance_by_live = {offer.live: offer.acceptance for offer in offers}
        asking = [
            live
            for live in decoding
            if self._most(live) >= 1
            and live.num_tokens < model.max_tokens
            and self._drafter(live).guesses.acceptance > acceptance_by_live.get(live, 0.0)
        ]
        if not asking:
            return offers
        room = min(model.max_tokens - live.num_tokens for live in asking)
        most = min(num_free // len(asking), room, *map(self._most, asking))
        count = num_guesses(
            [self._drafter(live).guesses.acceptance for live in asking],
            num_rows=len(decoding),
            step_s=step_s,
            token_s=model.token_s + len(asking) * self._costs.draft_token_s,
            most=most if model.token_s else min(most, FIRST_GUESSES),
        )
        if not count:
            model.decline()
            return offers
        texts = [DraftText(live.request, live.output_ids) for live in asking]
        drafts = model.draft(texts, count, step_s * MAX_STRETCH)
        guessed = {
            live: self._drafter(live).guess(guess, self._stop_ids(live))
            for live, guess in zip(asking, drafts, strict=True)
            if guess
        }
        # A guess that the answer ends now leaves nothing to compute, not even what was looked up.
        ours = (Offer(live, ids, self._drafter(live).acceptance) for live, ids in guessed.items() if ids)
        return [*ours, *(offer for offer in offers if offer.live not in guessed)]

    def _drafter(self, live: LiveRequest) -> Drafter:
        if live.drafter is None:
            live.drafter = Drafter(live.request, self._agreement.first(live.request.adapter))
        return live.drafter

    def _most(self, live: LiveRequest) -> int:
        """Return how many draft tokens a request may have."""
        # The last token that the request may have is drawn, but never computed.
        num_left = min(
            live.request.params.max_tokens - len(live.output_ids), self._config.max_model_len - live.num_tokens
        )
        return min(num_left - 1, self._config.num_speculative_tokens)

    def _stop_ids(self, live: LiveRequest) -> frozenset[int]:
        stop_ids = live.request.params.stop_token_ids
        return self._eos_ids.union(stop_ids) if stop_ids else self._eos_ids


class Agreement:
    """How often a draft model guesses right for each adapter, so that each answer need not find out again.

    The acceptance rates are by adapter, None for the base model; of those that were not asked for longest, none is
    kept.
    """

    def __init__(self) -> None:
        self._rate_by_adapter: dict[AdapterDigest | None, float] = {}

    def first(self, adapter: AdapterDigest | None) -> float:
        """Return the acceptance rate to expect of a new answer."""
        rate = self._rate_by_adapter.pop(adapter, FIRST_AGREEMENT)
        rate += FORGOTTEN * (FIRST_AGREEMENT - rate)
        self._rate_by_adapter[adapter] = rate
        if len(self._rate_by_adapter) > MAX_ADAPTERS:
            del self._rate_by_adapter[next(iter(self._rate_by_adapter))]
        return rate

    def learn(self, adapter: AdapterDigest | None, acceptance: float) -> None:
        """Record the acceptance rate that an answer has reached."""
        if adapter in self._rate_by_adapter:
            self._rate_by_adapter[adapter] += NEW_SHARE * (acceptance - self._rate_by_adapter[adapter])


@dataclass(slots=True)
class Offer:
    """The draft that a request offers for a step.

    Attributes:
        acceptance: probability that a draft token is right if those before it are.
        num_wanted: number of its tokens to compute.
        num_expected: expected number of tokens that the step yields for the request.
        right: probability that the next draft token is right.
    """

    live: LiveRequest
    draft_ids: list[int]
    acceptance: float
    num_wanted: int = 0
    num_expected: float = 1.0
    right: float = 0.0

    def grow(self) -> None:
        """Add one token to those to compute."""
        self.num_wanted += 1
        self.num_expected += self.right
        self.right *= self.acceptance


def num_guesses(acceptances: Sequence[float], *, num_rows: int, step_s: float, token_s: float, most: int) -> int:
    """Return how many tokens a draft model should guess for each of some rows of a step; 0 if none are worth it.

    Args:
        acceptances: of the guesses of these rows.
        num_rows: all decodes of the step, which lasts `step_s` without drafts.
        token_s: seconds to guess and verify one more token for each of the rows.
        most: maximum.
    """
    best, best_rate = 0, num_rows / step_s if step_s else float("inf")
    expected, rights = [1.0] * len(acceptances), list(acceptances)
    for count in range(1, most + 1):
        expected = [tokens + right for tokens, right in zip(expected, rights, strict=True)]
        rights = [right * acceptance for right, acceptance in zip(rights, acceptances, strict=True)]
        took_s = step_s + count * token_s
        least = min(expected) if len(expected) == num_rows else 1.0
        if num_rows > 1 and took_s > step_s * max(least, 1 + MAX_STRETCH):
            break
        rate = (sum(expected) + num_rows - len(expected)) / took_s
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def share_out(offers: Sequence[Offer], step_s: float, token_s: float, *, num_rows: int, num_free: int) -> None:
    """Set how many tokens of each draft to compute in a step with `num_rows` decodes and `step_s` without drafts."""
    bound_s, plain_s, num_expected = step_s * (1 + MAX_STRETCH), step_s, float(num_rows)
    heap = []
    for index, offer in enumerate(offers):
        offer.right = offer.acceptance
        heap.append((-offer.right, index))
    heapify(heap)
    for _ in range(num_free):
        if not heap:
            return
        offer = offers[heap[0][1]]
        if offer.right * step_s <= token_s * num_expected:
            return
        step_s, num_expected = step_s + token_s, num_expected + offer.right
        if num_rows > 1 and step_s > bound_s:
            # A row without a draft gets one token from the step.
            least = min(other.num_expected for other in offers) if len(offers) == num_rows else 1.0
            if step_s > plain_s * least:
                return
        offer.grow()
        if offer.num_wanted < len(offer.draft_ids):
            heapreplace(heap, (-offer.right, heap[0][1]))
        else:
            heappop(heap)
