"""The ports of the pure core: what the scheduler asks of adapters, of the tiers below the cache and of a draft model.

All are structural types. Tests drive the core with scripted fakes; production uses `engine.adapter_pool.AdapterPool`,
`engine.tiers.mover.TierMover` and `engine.speculation.draft_model.DraftModel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from adapters.identity import AdapterDigest
from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName
from engine.request import Request


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
