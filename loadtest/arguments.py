"""Types of command-line arguments: what is wrong with one is a line, not a traceback."""

from __future__ import annotations

import math
import random
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.measure import Slo
from loadtest.workloads import TokenRange


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of whole numbers from `least` on, which raises ArgumentTypeError for others."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return parse


at_least_1 = at_least(1)


def above_0(text: str) -> float:
    """Parse a finite number above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be above 0, not {text}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers of at least 1, by commas.

    Raises:
        ArgumentTypeError: one is not.
    """
    return tuple(map(at_least_1, text.split(",")))


def folder_with(file: str) -> Callable[[str], str]:
    """Return a type of folders that have a file of this name, which raises ArgumentTypeError for others."""

    def parse(text: str) -> str:
        if not (Path(text) / file).is_file():
            raise ArgumentTypeError(f"there is no {file} in {text!r}")
        return text

    return parse


checkpoint_folder = folder_with("config.json")


def make_folder(folder: Path) -> None:
    """Create a folder for results, before they are measured.

    Raises:
        SystemExit: that is impossible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise SystemExit(f"loadtest: no results can be written to {folder} ({failure})") from failure


def http_url(text: str) -> str:
    """Return the base URL of a server, without a slash or the `/v1` of an OpenAI client at its end.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False  # the port is no number
    if not is_one:
        raise ArgumentTypeError(f"wants http://host:port, not {text!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def add_seed(parser: ArgumentParser) -> None:
    """Add an option for the seed of the prompts; by default a server has not seen them in an earlier run."""
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**31), help="of the prompts; default: another one in each run"
    )


def add_slo(parser: ArgumentParser, default: Slo | None = None) -> None:
    """Add the options that `slo_of` reads."""
    default = default or Slo()
    parser.add_argument(
        "--slo-ttft-ms", type=above_0, default=default.ttft_ms, help="objective: time to the first text"
    )
    parser.add_argument(
        "--slo-tpot-ms", type=above_0, default=default.tpot_ms, help="objective: mean time of an output token"
    )


def slo_of(options: Namespace) -> Slo:
    """Return the latency objectives."""
    return Slo(ttft_ms=options.slo_ttft_ms, tpot_ms=options.slo_tpot_ms)


def add_token_ids(parser: ArgumentParser) -> None:
    """Add the options that `token_ids` reads."""
    parser.add_argument(
        "--first-id", type=at_least(0), default=300, help="prompts are drawn from token ids [first, last)"
    )
    parser.add_argument("--last-id", type=at_least_1, default=1000)


def token_ids(parser: ArgumentParser, options: Namespace) -> TokenRange:
    """Return the range to draw prompts from; end the program if it is empty."""
    if options.first_id >= options.last_id:
        parser.error(f"--first-id {options.first_id} must be less than --last-id {options.last_id}")
    return TokenRange(start=options.first_id, end=options.last_id)
