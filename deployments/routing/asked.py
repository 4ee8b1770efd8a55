"""A request as routing sees it: its length, and the marks of its prefixes in a prefix cache. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.generation_calls import GenerationCall, unpack_ids
from deployments.routing.report import adapter_mark
from engine.cache.prefix_index import Lineage, landmark


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The properties of a request that routing uses.

    Attributes:
        num_tokens: tokens of the prompt and of the output that another replica has already generated.
        block_marks: the mark of each full block in order, by `engine.cache.prefix_index.landmark`.
        adapter: its mark; None for the base model.
    """

    request_id: str
    num_tokens: int
    block_marks: Sequence[int] = ()
    adapter: int | None = None

    def landmarks(self, stride_blocks: int) -> Sequence[int]:
        """Return the marks that a replica with this landmark stride keeps; none for a stride of 0."""
        return self.block_marks[stride_blocks - 1 :: stride_blocks] if stride_blocks else ()

    @property
    def key(self) -> int:
        """64-bit key: the last full block's mark, so that gateways choose alike, or else a hash of the request id."""
        return self.block_marks[-1] if self.block_marks else hash64(self.request_id)


def hash64(text: str) -> int:
    """Return a 64-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def asked_of(call: GenerationCall, block_tokens: int) -> Asked:
    """Return the routing properties of a call; `block_tokens` is 0 if no replica has a prefix cache."""
    if call.params.num_prompt_logprobs is not None:
        # Prompt log-probabilities require computing every token: the prefix cache does not help.
        block_tokens = 0
    ids = unpack_ids(call.prompt_ids) + unpack_ids(call.prior_output_ids)
    digest = None if call.adapter is None else call.adapter.digest
    marks: list[int] = []
    # The last token is never taken from the cache: its logits are needed.
    full = (len(ids) - 1) // block_tokens if block_tokens else 0
    lineage, name = Lineage(digest, call.salt, call.adapter_start), None
    for start in range(0, full * block_tokens, block_tokens or 1):
        name = lineage.next_name(name, start, ids[start : start + block_tokens])
        marks.append(landmark(name))
    return Asked(
        request_id=call.request_id,
        num_tokens=len(ids),
        block_marks=marks,
        adapter=None if digest is None else adapter_mark(digest),
    )
