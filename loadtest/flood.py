"""A tenant that sends requests without a pause, in its own process, so that it does not share the measurer's GIL.

    python -m loadtest.flood --url http://127.0.0.1:8000 --model NAME --streams 80

Prints a line as soon as every stream has received the first bytes of an answer, and runs until standard input closes.
Answers are discarded unparsed, since on a small machine this client competes with the server for CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import gevent  # type: ignore[import-untyped, unused-ignore]
from gevent.fileobject import FileObjectPosix  # type: ignore[import-untyped, unused-ignore]
from geventhttpclient import HTTPClient  # type: ignore[import-untyped, unused-ignore]

from loadtest.arguments import at_least_1, http_url
from loadtest.stream_client import headers_for
from loadtest.workloads import TokenRange, token_ask, token_prompt

IDS = TokenRange()
PROMPT_TOKENS = ANSWER_TOKENS = 128
PIECE_BYTES = 1 << 16


@contextmanager
def flooding(url: str, model: str, streams: int) -> Iterator[None]:
    """Run a flood for the duration of the block; all its streams have started when the block begins.

    Raises:
        RuntimeError: it ended before its streams had started, or a stream failed.
    """
    command = [sys.executable, "-m", "loadtest.flood", "--url", url, "--model", model, "--streams", str(streams)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError("the flood ended before it began")
            yield
        finally:
            process.stdin.close()
            has_failed = process.wait() != 0
    if has_failed:
        raise RuntimeError("a stream of the flood failed")


def keep_asking(client: HTTPClient, path: str, model: str, place: int, has_begun: gevent.event.Event) -> None:
    """Send one request after another forever, each with a new prompt, to a server below a path.

    Raises:
        RuntimeError: an answer's status is not 200.
    """
    number = 0
    while True:
        prompt = token_prompt(PROMPT_TOKENS, seed=f"flood/{os.getpid()}/{place}/{number}", ids=IDS)
        ask = token_ask(model, prompt, ANSWER_TOKENS, workload="flood")
        with client.post(path + ask.path, json.dumps(ask.body | {"stream": True}), headers_for()) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {response.read()[:500]!r}")
            while response.read(PIECE_BYTES):
                has_begun.set()
        number += 1


def main() -> None:
    """Flood until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.flood", description=__doc__)
    parser.add_argument("--url", type=http_url, required=True, help="http://host:port")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=at_least_1, default=80)
    options = parser.parse_args()
    client = HTTPClient.from_url(options.url, concurrency=options.streams, network_timeout=300)
    begun = [gevent.event.Event() for _ in range(options.streams)]
    path = urlsplit(options.url).path
    streams = [
        gevent.spawn(keep_asking, client, path, options.model, place, event) for place, event in enumerate(begun)
    ]
    for stream in streams:
        # Otherwise gevent only prints a greenlet's exception.
        stream.link_exception(lambda _: os._exit(1))
    gevent.wait(begun)
    print("begun", flush=True)
    FileObjectPosix(0).read()
    os._exit(0)


if __name__ == "__main__":
    main()
