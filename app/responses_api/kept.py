"""Conversations that the server keeps: what a request continues or refers to, and the response that is kept of it.

Ids of items contain that of their response, so that a reference needs no index: `msg_ID0` is its first output item,
`msg_IDi0` the first input item that its own request brought.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from app.responses_api.schemas import InputItem, InputTokensRequest, ResponseObject, ResponsesRequest
from app.translation.bounds import check_count
from deployments.batches.values import KeptResponse
from deployments.errors import UnavailableError
from engine.errors import RequestError

if TYPE_CHECKING:
    from deployments.batches.client import BatchClient

Body = TypeVar("Body", bound=InputTokensRequest)
Aside = Callable[[Callable[[], Any]], Awaitable[Any]]

MAX_REFERRED = 1000
"""Responses whose items a request may refer to."""
MAX_PARTS = 8
"""Parts of an item that are stored as they came; more are joined, as they are for the model."""

_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})(?:i?\d+|r)")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_log = logging.getLogger(__name__)


class Conversations:
    """A tenant's kept responses.

    Args:
        client: None if the server keeps none.
        aside: does work of the tenant's on another thread.
        max_items: bound on the items of a request, with those of what it continues: each takes time and memory, even
            if it holds no text.
    """

    def __init__(self, client: BatchClient | None, tenant: str, *, aside: Aside, max_items: int) -> None:
        self._client = client
        self._tenant = tenant
        self._aside = aside
        self._max_items = max_items

    def keeps(self, body: ResponsesRequest) -> bool:
        """Return whether the response to a request is to be kept.

        Raises:
            RequestError: it is to be, and the server keeps none.
        """
        if body.store and self._client is None:
            words = "must be false: this server stores no responses."
            raise RequestError.about("store", words, code="unsupported_parameter")
        return self._client is not None and body.store is not False

    async def whole(self, body: Body) -> tuple[Body, list[InputItem]]:
        """Return the request with the items that it refers to, and the items of what it continues, oldest first.

        Raises:
            RequestError: something of it is not kept, or it has too many items.
            UnavailableError: what is kept cannot be reached.
        """
        previous_id, earlier = body.previous_response_id, list[InputItem]()
        num_own = len(body.input) if isinstance(body.input, list) else 1
        check_count(num_own, self._max_items, "items", field="input")
        if previous_id is not None:
            if self._client is None:
                words = "is not supported: this server stores no responses. Send all turns in 'input'."
                raise RequestError.about("previous_response_id", words, code="unsupported_parameter")
            kept = await self._client.conversation(self._tenant, previous_id)
            earlier = await self._aside(partial(_read, kept, self._max_items - num_own))
        if isinstance(body.input, list) and any(item.type == "item_reference" for item in body.input):
            body = body.model_copy(update={"input": await self._resolved(body.input)})
        return body, earlier

    async def keep(self, body: ResponsesRequest, response: ResponseObject) -> bool:
        """Keep a response and what its request brought; return whether that was possible."""
        assert self._client is not None

        def make() -> KeptResponse:
            return KeptResponse(
                response_id=response.id,
                tenant=self._tenant,
                previous_id=body.previous_response_id,
                created_s=response.created_at,
                input_items=orjson.dumps(own_items(body.input, response.id)),
                body=response.model_dump_json().encode(),
            )

        try:
            # An input may have megabytes.
            await self._client.keep_response(await asyncio.to_thread(make))
        except UnavailableError as error:
            # The answer is there; that it cannot be continued is told by its field `store`.
            _log.warning("response %s is not stored: %s", response.id, error)
            return False
        return True

    async def _resolved(self, items: Sequence[InputItem]) -> list[InputItem]:
        places = {index: item.id or "" for index, item in enumerate(items) if item.type == "item_reference"}
        if self._client is None:
            field = f"input[{min(places)}].type"
            advice = "this server stores no items to refer to; send the item itself, as clients do with 'store: false'"
            raise RequestError(f"Unsupported: '{field}': {advice}.", field=field, code="unsupported_value")
        asked = {f"resp_{found[1]}" for found in map(_ITEM_ID.fullmatch, places.values()) if found}
        if len(asked) > MAX_REFERRED:
            message = f"'input' refers to items of {len(asked)} responses; at most {MAX_REFERRED} are allowed."
            raise RequestError(message, field="input", code="invalid_value")
        kept = await self._client.responses(self._tenant, sorted(asked))
        item_by_id = await self._aside(partial(_chosen, kept, frozenset(places.values())))
        for index, item_id in places.items():
            if item_id not in item_by_id:
                field = f"input[{index}].id"
                raise RequestError(f"Item with id '{item_id}' not found.", field=field, code="item_not_found")
        return [item_by_id[places[index]] if index in places else item for index, item in enumerate(items)]


def own_items(given: str | Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Return a request's input as items with ids."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    identity = response_id.partition("_")[2]
    return [{"id": f"{_PREFIXES[item.type]}_{identity}i{index}"} | _plain(item) for index, item in enumerate(items)]


def items_of(kept: Iterable[KeptResponse], *, with_last_output: bool = True) -> list[dict[str, Any]]:
    """Return what the requests of responses brought, each followed by the output of its response."""
    items: list[dict[str, Any]] = []
    num_output = 0
    for one in kept:
        output = orjson.loads(one.body)["output"]
        items += orjson.loads(one.input_items) + output
        num_output = len(output)
    return items if with_last_output else items[: len(items) - num_output]


def _plain(item: InputItem) -> dict[str, Any]:
    plain = item.model_dump(mode="json", exclude_none=True)
    if isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        plain["content"] = [{"type": kind, "text": item.content}]
    plain |= {name: _fewer(value) for name, value in plain.items() if isinstance(value, list)}
    return plain | ({"status": "completed"} if item.type != "reasoning" else {})


def _fewer(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parts of the same text without empty ones: whoever continues a response reads all of them again."""
    some = [part for part in parts if part[_text_field(part)]]
    if len(some) <= MAX_PARTS:
        return some or parts[:1]
    text = "".join(part[_text_field(part)] for part in some)
    return [{"type": some[0]["type"], _text_field(some[0]): text}]


def _text_field(part: dict[str, Any]) -> str:
    return "refusal" if part["type"] == "refusal" else "text"


def _read(kept: Iterable[KeptResponse], max_items: int) -> list[InputItem]:
    """Return what responses continue and say.

    Raises:
        RequestError: there are too many items.
    """
    items = items_of(kept)
    check_count(len(items), max_items, "items besides those of 'input'", field="previous_response_id")
    return [InputItem.model_validate(item) for item in items]


def _chosen(kept: Iterable[KeptResponse], item_ids: Collection[str]) -> dict[str, InputItem]:
    """Return those of the items that are there, by their ids."""
    return {item["id"]: InputItem.model_validate(item) for item in items_of(kept) if item["id"] in item_ids}
