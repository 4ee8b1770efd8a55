"""The borders of the pure core: what the scheduler asks of adapters and of tiers below the cache, and what the loop
asks of a device.

All are structural. Tests drive the core through scripted stand-ins; the product plugs in `engine.runner.Runner`,
`engine.adapter_pool.AdapterPool` and `engine.tiers.mover.TierMover`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from adapters.identity import AdapterDigest, AdapterRef
from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName
from engine.metrics import StepTimes
from engine.step import StepPlan, StepResult


class AdapterGate(Protocol):
    """Residency of adapters, asked by the scheduler on the engine's thread; no call blocks or touches a disk."""

    def prepare(self, digest: AdapterDigest) -> None:
        """Start moving the adapter towards the device in the background; idempotent. Called as a request queues."""
        ...

    def try_pin(self, digest: AdapterDigest) -> bool:
        """Pin the adapter on the device for one running request, or return False: still loading, or no slot free."""
        ...

    def swap_s(self, digest: AdapterDigest) -> float:
        """Return about how long it takes to fetch the adapter; 0 where it is on the device, or nothing is known yet."""
        ...

    def waits_for_slot(self, digest: AdapterDigest) -> bool:
        """Whether the adapter is loaded and only a free slot on the device is missing."""
        ...

    def unpin(self, digest: AdapterDigest) -> None:
        """Undo one `try_pin` that returned True."""
        ...

    def lacked_room(self) -> bool:
        """Whether, since this was last asked, an adapter found no room, or took another's where memory was short."""
        ...

    def lend(self, run: range) -> None:
        """Let adapters lie in the memory of these blocks of the cache, until `give_back` returns them."""
        ...

    def give_back(self) -> range | None:
        """Take the adapters that nobody has pinned out of a lent run and return it; None where there is no such run."""
        ...

    def error(self, digest: AdapterDigest) -> str | None:
        """Why the adapter cannot become resident (unknown, unreadable, does not fit), or None."""
        ...

    def passes(self, digest: AdapterDigest) -> bool:
        """Whether that may soon be over, and is no fault of the adapter's."""
        ...


class AdapterStock(Protocol):
    """The adapters of an engine as others see them; every method is for any thread and blocks on nothing."""

    def num_resident(self) -> int:
        """Return how many adapters are usable on the device now."""
        ...

    def load_s(self) -> float:
        """Return about how long it takes to read an adapter; 0 where none has been read yet."""
        ...

    def learn(self, ref: AdapterRef) -> None:
        """Make an adapter known, so that requests can name its digest."""
        ...

    def release(self, digest: AdapterDigest) -> int | None:
        """Forget an adapter; return the bytes that this freed, or None where running requests hold it still."""
        ...

    def places(self) -> Mapping[AdapterDigest, str]:
        """Return where adapters lie: "device", "host" or "loading"; those that lie nowhere are left out."""
        ...


class KeptBlock(NamedTuple):
    """What a slot of a tier holds: a block by its name, and its place in its chain (`prefix_index.ASIDE` for none)."""

    name: BlockName
    depth: int
    slot: int


class StoreOrder(NamedTuple):
    """A block to copy to a slot of each tier, None where it is not to be copied there."""

    block: BlockId
    name: BlockName
    depth: int
    slots: tuple[int | None, ...]


class FetchOrder(NamedTuple):
    """A block to fill with what a slot of a tier holds."""

    block: BlockId
    name: BlockName
    depth: int
    tier: int
    slot: int


class BlockMover(Protocol):
    """Copies blocks between the device's cache and the tiers below it, in the background; no call blocks.

    Everything is called on the engine's thread.

    Attributes:
        capacities: slots of each tier, the nearest to the device first.
    """

    capacities: Sequence[int]

    def contents(self) -> Sequence[Sequence[KeptBlock]]:
        """Return what each tier holds at the start, the least recently used first."""
        ...

    def store(self, orders: Sequence[StoreOrder]) -> None:
        """Begin to copy blocks that nobody writes to, until `abandon` is called for them."""
        ...

    def abandon(self, block: BlockId) -> None:
        """See to it that no copy counts as made that has not been read out of the block yet: it will be overwritten."""
        ...

    def stored(self) -> list[tuple[StoreOrder, Sequence[bool]]]:
        """Return the orders that are done since this was last asked, and for each tier whether its slot was written."""
        ...

    def fetch(self, ticket: int, orders: Sequence[FetchOrder]) -> None:
        """Begin to fill blocks that nobody reads or writes until it is done, in their order."""
        ...

    def fetched(self) -> list[tuple[int, int]]:
        """Return the fetches that are done since this was last asked: ticket, and how many leading orders were filled.

        Of one with fewer than it has, the order behind them could not be read, and never will be.
        """
        ...

    def give_up(self, ticket: int) -> None:
        """Write nothing more for a fetch, from now on; it is done when what is being read has been."""
        ...

    def fetch_s(self, num_blocks: int) -> float:
        """Return about how long it takes to fetch so many blocks; 0 before any was measured."""
        ...


class PauseWish(Protocol):
    """Asks whoever computes a step to pause, so that another may go before it; any thread."""

    def set(self) -> None:
        """Ask."""
        ...

    def clear(self) -> None:
        """Ask no more."""
        ...


class StepRunner(Protocol):
    """Owns device memory and executes plans in order; all calls come from the engine's thread."""

    @property
    def times(self) -> StepTimes:
        """Return the seconds spent in each part so far."""
        ...

    @property
    def steps_ahead(self) -> int:
        """So many plans may be under way while another is made; 0 where `submit` computes at once."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Make one plan ready; `proceed` follows until it is computed, or another plan that goes before it."""
        ...

    def proceed(self) -> bool:
        """Compute the newest plan, or enqueue it where the device works by itself; True where it has paused."""
        ...

    def collect(self) -> StepResult:
        """Wait for the plan that was computed first and return what it drew.

        Raises:
            EngineError: the device failed; the engine cannot go on.
        """
        ...

    def idle(self) -> bool:
        """Do a little of what makes later steps faster, while there is no step to run; False where nothing is left."""
        ...
