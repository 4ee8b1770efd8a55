"""A small HTTP server with scripted answers, so that the load tests' own tools can be tested without the product."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, object]], "Iterable[bytes] | tuple[int, bytes]"]
"""Body of a request -> pieces of the stream, or (status, body) of a refusal. A piece `CUT` drops the connection."""

CUT = b"\0cut"
MODELS = {"object": "list", "data": [{"id": "base"}, {"id": "capitals", "parent": "base"}]}


def frame(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def answer(body: dict[str, object], words: int = 3) -> list[bytes]:
    """A whole chat or text answer of so many words, with usage."""
    is_chat = "messages" in body
    pieces = [frame({"choices": [{"delta": {"role": "assistant", "content": ""}}]})] if is_chat else []
    for _ in range(words):
        pieces.append(frame({"choices": [{"delta": {"content": "word "}} if is_chat else {"text": "word "}]}))
    pieces.append(frame({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
    usage = {"prompt_tokens": 10, "completion_tokens": words, "prompt_tokens_details": {"cached_tokens": 4}}
    return [*pieces, frame({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


@contextmanager
def scripted_server(script: Script = answer, key: str | None = None) -> Iterator[str]:
    """Serve on a free port, those with the API key if there is one, and yield the base URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self._is_welcome():
                self._whole(200, json.dumps(MODELS).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self._is_welcome():
                return
            scripted = script(body)
            if isinstance(scripted, tuple):
                self._whole(*scripted)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in scripted:
                if piece == CUT:
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def _is_welcome(self) -> bool:
            if not self.path.startswith("/v1/"):
                self._whole(404, f"there is no {self.path}".encode())
            elif key is not None and self.headers["authorization"] != f"Bearer {key}":
                self._whole(401, b"who are you?")
            else:
                return True
            return False

        def _whole(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(*arguments)

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
