"""The servers that a comparison is told of: their labels, and what they list at `/v1/models`."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.arguments import http_url
from loadtest.stream_client import ServedModel, StreamClient, StreamError


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedUrl:
    """A server's label in a table, and its base URL."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> NamedUrl:
        """Parse `name=url`, or a URL alone, which is its own name.

        Raises:
            ArgumentTypeError: the text is neither.
        """
        name, _, url = text.partition("=")
        if "://" in name:
            name = url = text
        try:
            return cls(name=name, url=http_url(url))
        except ArgumentTypeError:
            raise ArgumentTypeError(f"wants [name=]http://host:port, not {text!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running server.

    Attributes:
        model: name to request.
        context_tokens: context length of that model; None if the server does not list it.
    """

    name: str
    url: str
    model: str
    context_tokens: int | None = None


def refuse_twice(names: Sequence[str]) -> None:
    """Refuse two servers of one name, whose figures could not be told apart.

    Raises:
        SystemExit: a name is there twice.
    """
    for name in names:
        if names.count(name) > 1:
            raise SystemExit(f"loadtest: --url: two servers are named {name!r}; give each its own: --url name=URL")


def models_of(server: NamedUrl) -> list[ServedModel]:
    """Return the models that a server lists, except those that generate no text.

    Raises:
        SystemExit: it does not answer.
    """
    client = StreamClient(server.url)
    try:
        return [model for model in client.models() if model.generates]
    except (OSError, StreamError) as failure:
        raise SystemExit(f"loadtest: {server.name} does not answer at {server.url} ({failure})") from failure
    finally:
        client.close()


def find_server(server: NamedUrl, model: str | None) -> Server:
    """Ask a server for its first base model, unless `model` is given.

    Raises:
        SystemExit: it does not answer, or lists no base model.
    """
    served = models_of(server)
    model = model or next((one.name for one in served if one.parent is None), None)
    if model is None:
        raise SystemExit(f"loadtest: {server.name} lists no base model that generates text; name one with --model")
    context_tokens = next((one.context_tokens for one in served if one.name == model), None)
    return Server(name=server.name, url=server.url, model=model, context_tokens=context_tokens)
