"""The ports of the pure core: the scheduler's interfaces to adapters and to the tiers below the cache, and the loop's
interface to a device.

All are structural types. Tests drive the core with scripted fakes; production uses `engine.runner.Runner`,
`engine.adapter_pool.AdapterPool` and `engine.tiers.mover.TierMover`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from adapters.identity import AdapterDigest, AdapterRef
from adapters.loads import AdapterLoads
from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName
from engine.metrics import StepTimes
from engine.request import Request
from engine.step import StepPlan, StepResult


class AdapterGate(Protocol):
    """Adapter residency, called by the scheduler on the engine's thread; no call blocks or accesses a disk."""

    def prepare(self, digest: AdapterDigest) -> None:
        """Start loading the adapter in the background, if there is room; idempotent. Called when a request is queued.

        Those that `try_pin` is called for come first.
        """
        ...

    def try_pin(self, digest: AdapterDigest) -> bool:
        """Pin the adapter on the device for one running request; return False if it is loading or no slot is free.

        If it is not loaded, its load starts as soon as there is room.
        """
        ...

    def swap_s(self, digest: AdapterDigest) -> float:
        """Return the expected load time of the adapter; 0 if it needs no load or nothing has been measured yet."""
        ...

    def waits_for_slot(self, digest: AdapterDigest) -> bool:
        """Return whether the adapter waits for others to be unpinned: for a slot, or for memory to be loaded into."""
        ...

    def unpin(self, digest: AdapterDigest) -> None:
        """Undo one `try_pin` that returned True."""
        ...

    def lacked_room(self) -> bool:
        """Return whether, since the last call, an adapter found no room or evicted another for lack of memory."""
        ...

    def lend(self, run: range) -> None:
        """Let adapters use the memory of these KV cache blocks until `give_back` returns them."""
        ...

    def give_back(self) -> range | None:
        """Evict the adapters from a lent run and return it; None if every run holds one that cannot be evicted."""
        ...

    def error(self, digest: AdapterDigest) -> str | None:
        """Return why the adapter cannot become resident (unknown, unreadable, does not fit), or None."""
        ...

    def passes(self, digest: AdapterDigest) -> bool:
        """Return whether the failure that `error` reports is transient and not the adapter's fault."""
        ...


class AdapterStock(Protocol):
    """The public view of an engine's adapters; every method may be called on any thread and does not block."""

    @property
    def loads(self) -> AdapterLoads:
        """The loads so far."""
        ...

    def num_resident(self) -> int:
        """Return how many adapters are usable on the device now."""
        ...

    def learn(self, ref: AdapterRef) -> None:
        """Declare an adapter, so that requests can name its digest."""
        ...

    def forget_failure(self, digest: AdapterDigest) -> None:
        """Let an adapter be tried again at once: the files that could not be used have been replaced."""
        ...

    def release(self, digest: AdapterDigest) -> int | None:
        """Forget an adapter; return the bytes freed, or None if it is still pinned or being copied to the device."""
        ...

    def places(self) -> Mapping[AdapterDigest, str]:
        """Return the place of each adapter in memory or on its way there: "device", "host" or "loading"."""
        ...


class KeptBlock(NamedTuple):
    """A block in a slot of a tier: its name, and its index in its chain (`prefix_index.ASIDE` if it has none)."""

    name: BlockName
    depth: int
    slot: int


class BlockOrder(NamedTuple):
    """A block to copy to a slot of a tier, or to fill from one."""

    block: BlockId
    name: BlockName
    depth: int
    tier: int
    slot: int


class BlockMover(Protocol):
    """Copies blocks between the device's cache and the tiers below it, in the background.

    No call blocks; all calls but `fetch_s` come from the engine's thread.

    Attributes:
        capacities: number of slots of each tier, the nearest to the device first.
    """

    capacities: Sequence[int]

    def contents(self) -> Sequence[Sequence[KeptBlock]]:
        """Return the content of each tier at the start, least recently used first."""
        ...

    def store(self, orders: Sequence[BlockOrder]) -> None:
        """Start copying blocks; nobody writes to them before calling `abandon`."""
        ...

    def abandon(self, block: BlockId) -> None:
        """Invalidate copies of a block that have not been read from it yet: it will be overwritten."""
        ...

    def stored(self) -> list[tuple[BlockOrder, bool]]:
        """Return the orders finished since the last call, with whether their slots were written."""
        ...

    def fetch(self, ticket: int, orders: Sequence[BlockOrder]) -> None:
        """Start filling blocks in order; nobody reads or writes them until the fetch is done."""
        ...

    def fetched(self) -> list[tuple[int, int]]:
        """Return the fetches finished since the last call: ticket, and number of leading orders filled.

        If not all were filled, the next order could not be read and never will be, or the fetch was given up.
        """
        ...

    def give_up(self, ticket: int) -> None:
        """Cancel a fetch: nothing more is written for it, and it is finished once the current read has ended."""
        ...

    def fetch_s(self, num_by_tier: Mapping[int, int]) -> float:
        """Return the expected time to fetch so many blocks of each tier; 0 before any measurement; any thread."""
        ...


class DraftText(NamedTuple):
    """A text to continue: a request and its output so far (live view; read, never kept)."""

    request: Request
    output_ids: Sequence[int]


class Drafting(Protocol):
    """Continues texts by a small model, quickly and often right; called on the engine's thread.

    Attributes:
        max_texts: number of texts that can be continued at once.
        max_tokens: length of the longest text, with its draft.
        token_s: seconds that one more token of all drafts of a call takes; 0 before any was measured.
    """

    max_texts: int
    max_tokens: int
    token_s: float

    def draft(self, texts: Sequence[DraftText], count: int, read_s: float) -> list[list[int]]:
        """Return up to `count` tokens that may follow each text.

        A draft is empty if the text has not been read yet, has tokens unknown to the model, or would be too long.

        Args:
            read_s: about how many seconds may be spent on reading a text that is new.
        """
        ...

    def decline(self) -> None:
        """Note that no draft was expected to pay off at this `token_s`."""
        ...


class PauseWish(Protocol):
    """Asks the runner to pause the current step so that another can go first; any thread."""

    def set(self) -> None:
        """Request a pause."""
        ...

    def clear(self) -> None:
        """Withdraw the request."""
        ...

    def is_set(self) -> bool:
        """Tell whether a pause is requested."""
        ...


class StepRunner(Protocol):
    """Owns device memory and executes plans in order; all calls come from the engine's thread."""

    @property
    def times(self) -> StepTimes:
        """Return the seconds spent in each part so far, to which the engine adds those that it spends itself."""
        ...

    @property
    def steps_ahead(self) -> int:
        """Number of plans that may be in flight while another is made; 0 if `proceed` computes synchronously."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Prepare a plan; the caller then calls `proceed` until it is computed, or submits one that goes first."""
        ...

    def proceed(self) -> bool:
        """Compute the newest plan, or enqueue it on an asynchronous device; return True if it has paused."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest computed plan and return its result.

        Raises:
            EngineError: the device failed; the engine cannot continue.
        """
        ...

    def idle(self) -> bool:
        """Do a little work that makes later steps faster, while there is no step to run; False if none is left."""
        ...
