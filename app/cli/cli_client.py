"""Commands that talk to a running server: `antiphon models`, `antiphon adapters`, `antiphon chat`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

TIMEOUT_S = 600.0
NOT_OURS = "is this an Antiphon server?"
OPTION_BY_FIELD = {"base_model_name": "--base", "load_inplace": "--replace"}
"""Options of commands by the fields of requests that errors name."""

Url = Annotated[str, typer.Option(help="URL of the server.", envvar="ANTIPHON_URL")]
Key = Annotated[str, typer.Option(help="API key.", envvar="ANTIPHON_API_KEY")]
AdminKey = Annotated[str, typer.Option(help="Admin key.", envvar="ANTIPHON_ADMIN_KEY")]
DEFAULT_URL = "http://127.0.0.1:8000"

adapters = typer.Typer(help="List, load, unload and route adapters; requires the admin key.", no_args_is_help=True)
console = Console()
_PIPE_WIDTH = 10_000
_FOR_GOOD = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)
"""Statuses of every question of a chat, whatever it says."""
_INVISIBLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""Control characters, with which an answer could rename the terminal's window or fill its clipboard."""


class AskError(Exception):
    """The server is unreachable or returned an error; the text is shown to the user."""


class WrongInputError(AskError):
    """The command cannot mean what its arguments say; nothing was sent."""


class RefusedError(AskError):
    """This request failed, but another one may be answered: not about the key or the model."""


@contextmanager
def connected(url: str, key: str) -> Iterator[httpx.Client]:
    """Open an HTTP client; its transport errors, and answers of another form than ours, become one line.

    Raises:
        AskError: the server did not respond or is of another kind.
        WrongInputError: the key cannot be sent.
    """
    if not (key.isascii() and key.isprintable()):
        raise WrongInputError("the key has characters that no header can carry: only printable ASCII is taken (--key)")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # As OpenAI's clients have it, or a browser.
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskError(f"{url} did not respond ({type(error).__name__})") from error
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise AskError(f"{url} answered in an unknown form: {NOT_OURS}") from error


def answered(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON body of a response.

    Raises:
        AskError: the response is not JSON, or an error; with the server's message.
        RefusedError: it is an error that the next request may not meet.
    """
    try:
        body: dict[str, Any] = response.json()
    except ValueError:
        raise AskError(f"status {response.status_code} without JSON: {NOT_OURS}") from None
    if response.status_code >= 400:
        try:
            message = str(body["error"]["message"])
        except (LookupError, TypeError):
            raise AskError(f"status {response.status_code} without a message: {NOT_OURS}") from None
        option = "--key" if response.status_code == httpx.codes.UNAUTHORIZED else None
        option = next((option for field, option in OPTION_BY_FIELD.items() if f"'{field}'" in message), option)
        refusal = AskError if response.status_code in _FOR_GOOD else RefusedError
        raise refusal(message if option is None else f"{message.rstrip('.')}. Set it with {option}.")
    return body


def models(url: Url = DEFAULT_URL, key: Key = "") -> None:
    """List base models and their adapters."""
    with connected(url, key) as client:
        table = _table("model", "adapter of", "context")
        for card in answered(client.get("/v1/models"))["data"]:
            table.add_row(card["id"], card.get("parent") or "", str(card.get("max_model_len", "")))
    _show(table)


@adapters.command("list")
def list_adapters(url: Url = DEFAULT_URL, key: AdminKey = "") -> None:
    """List adapters with their versions, traffic shares and location on each replica."""
    with connected(url, key) as client:
        table = _table("adapter", "of", "version", "share", "digest", "replicas")
        for entry in answered(client.get("/v1/adapters"))["data"]:
            for version in entry["versions"]:
                places = ", ".join(f"{replica[-6:]}: {place}" for replica, place in version["replicas"].items())
                share = "on trial" if version["state"] == "trial" else f"{version['percent']} %"
                is_served = version["state"] not in ("misfit", "shadowed")
                places = places if is_served else f"cannot be served: {version['reason']}"
                row = (entry["id"], entry["parent"], str(version["version"]), share)
                table.add_row(*row, version["digest"][:12], places)
    _show(table)


@adapters.command("load")
def load_adapter(
    name: str,
    folder: Annotated[str, typer.Argument(help="Folder in PEFT layout in one that the server allows, or a URL.")],
    base: Annotated[str | None, typer.Option(help="Base model; required if there are several.")] = None,
    replace: Annotated[bool, typer.Option(help="Load a new version of an existing name.")] = False,
    percent: Annotated[
        int, typer.Option(min=0, max=100, help="Share of the name's traffic for this version; 0: only NAME@VERSION.")
    ] = 100,
    canary: Annotated[str | None, typer.Option(help="Prompt that the adapter must answer before it is served.")] = None,
    expect: Annotated[str | None, typer.Option(help="Text that this answer must contain.")] = None,
    url: Url = DEFAULT_URL,
    key: AdminKey = "",
) -> None:
    """Load an adapter under a name on every replica."""
    if expect is not None and canary is None:
        raise WrongInputError("--expect requires --canary")
    body: dict[str, Any] = {"lora_name": name, "lora_path": folder, "load_inplace": replace, "percent": percent}
    if base is not None:
        body["base_model_name"] = base
    if canary is not None:
        body["canary"] = {"prompt": canary, "expect": expect}
    with connected(url, key) as client, console.status(Text(f"loading {name}")):
        entry = answered(client.post("/v1/load_lora_adapter", json=body))
        newest = entry["versions"][-1]
        told = f"{entry['id']} is loaded, version {newest['version']}, with {newest['percent']} % of its traffic."
    console.print(Text(told), soft_wrap=True)


@adapters.command("unload")
def unload_adapter(
    name: str,
    version: Annotated[int | None, typer.Option(help="Unload only this version.")] = None,
    url: Url = DEFAULT_URL,
    key: AdminKey = "",
) -> None:
    """Unload an adapter: remove it, wait for requests that use it, and free its memory."""
    with connected(url, key) as client, console.status(Text(f"waiting for the requests of {name}")):
        freed = answered(client.post("/v1/unload_lora_adapter", json={"lora_name": name, "version": version}))
        what = name if version is None else f"Version {version} of {name}"
        told = f"{what} was unloaded; {sum(freed['freed_bytes']):,} bytes were freed."
        if left := freed.get("remaining"):
            told += f" {name}: {_told_shares({v['version']: v['percent'] for v in left['versions']})}"
    console.print(Text(told), soft_wrap=True)


@adapters.command("route")
def route_adapter(
    name: str,
    split: Annotated[list[str], typer.Argument(help="VERSION=PERCENT pairs, such as 3=90 4=10.")],
    url: Url = DEFAULT_URL,
    key: AdminKey = "",
) -> None:
    """Promote a version, roll back to one, or split a name's traffic among versions."""
    shares = _shares(split)
    with connected(url, key) as client:
        routed = answered(client.post(f"/v1/adapters/{quote(name, safe='')}/route", json={"split": shares}))["id"]
    console.print(Text(f"{routed}: {_told_shares(shares)}"), soft_wrap=True)


def _told_shares(shares: Mapping[Any, int]) -> str:
    return ", ".join(f"version {number} {percent} %" for number, percent in shares.items())


def _shares(split: list[str]) -> dict[str, int]:
    """Return the percent of each version of VERSION=PERCENT pairs; raise WrongInputError if one is none."""
    shares: dict[str, int] = {}
    for pair in split:
        number, _, percent = pair.partition("=")
        if not (number.isascii() and number.isdigit() and percent):
            raise WrongInputError(f"'{pair}' is not VERSION=PERCENT, such as 3=90")
        if not re.fullmatch("0*([0-9]{1,2}|100)", percent):
            raise WrongInputError(f"'{pair}': a share is a whole number of percent from 0 to 100")
        number = number.lstrip("0") or "0"
        if number in shares:
            raise WrongInputError(f"version {number} is named twice")
        shares[number] = int(percent)
    return shares


def chat(
    model: Annotated[
        str | None, typer.Argument(help="Model or adapter; default: the first that the server lists.")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
) -> None:
    """Chat with a model in the terminal; an empty line or Ctrl-D quits, Ctrl-C cancels an answer.

    A question that is refused is forgotten, and the chat goes on; the status is 1 if it was the last.
    """
    with connected(url, key) as client:
        names = [model] if model else [card["id"] for card in answered(client.get("/v1/models"))["data"]]
        if not names:
            raise AskError("the server lists no model that this key may use")
        name = names[0]
        turns: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        console.print(Text(name, style="dim"), soft_wrap=True)
        is_refused = False
        while question := _question():
            turns.append({"role": "user", "content": question})
            body = {"model": name, "messages": turns, "temperature": temperature, "stream": True}
            answer, is_refused = "", False
            try:
                for piece in _pieces(client, body | ({} if max_tokens is None else {"max_tokens": max_tokens})):
                    answer += piece
                    # `console` would make an emoji of `x[:a:]` and spaces of tabs.
                    sys.stdout.write(piece.translate(_INVISIBLE))
                    sys.stdout.flush()
            except KeyboardInterrupt:
                console.print(" [dim](cancelled)[/dim]", end="")
            except RefusedError as error:
                if answer:
                    console.print()
                print(f"error: {error}", file=sys.stderr, flush=True)
                is_refused = True
                turns.pop()
                continue
            console.print()
            turns.append({"role": "assistant", "content": answer})
        if is_refused:
            raise typer.Exit(1)


def _table(*names: str) -> Table:
    return Table(*(Column(name, overflow="fold") for name in names))


def _show(table: Table) -> None:
    """Print a table with whole names, to a program in one line for each row."""
    (console if console.is_terminal else Console(width=_PIPE_WIDTH)).print(table)


def _question() -> str:
    try:
        # Bytes that are no text in the terminal's encoding cannot be sent.
        return console.input("[bold]> [/bold]").strip().encode(errors="replace").decode()
    except EOFError:
        return ""


def _pieces(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.read()
            answered(response)
            raise AskError(f"the answer is not a stream: {NOT_OURS}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RefusedError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or choice["delta"].get("refusal") or ""
