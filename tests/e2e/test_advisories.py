"""What servers of this kind have been attacked through, tried on a running one; docs/security.md lists the classes.

After each attempt the server must be alive: a small chat is answered at once, and nobody has died.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import pickle
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from tests.e2e.server import ADMIN_KEY, ROOT, Server, key_of, until

pytestmark = pytest.mark.e2e

BASE = "stdlib-chat"
KEY, OTHER_KEY = key_of("blue"), key_of("red")
MARK = "a-phrase-that-nobody-else-writes"
JSON = {"content-type": "application/json"}
OWN = JSON | {"authorization": f"Bearer {KEY}"}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
SLOW_S = 60.0
"""Far over what an answer takes on a busy machine, and far under what an attack of this kind would cost."""
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|\.py\b|/(home|usr|opt|tmp|work|root|var)/")


@pytest.fixture(scope="module")
def server(guarded: Server) -> Server:
    return guarded


@pytest.fixture(autouse=True)
def survives(server: Server) -> Iterator[None]:
    """Whatever a test has done, the same processes live, and a chat is answered."""
    before = {process.pid for process in server.processes("ServeReplica")}
    yield
    with server.http() as http:
        answer = http.post("/v1/chat/completions", headers=OWN, json=chat(max_tokens=3))
        assert answer.status_code == 200, answer.text
    assert {process.pid for process in server.processes("ServeReplica")} == before


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": BASE, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]} | fields


def post(server: Server, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with server.http() as http:
        response = http.post(path, headers=OWN | headers, content=content)
    if response.status_code >= 400:
        assert not LEAK.search(response.text), response.text
        assert set(response.json()["error"]) >= {"message", "type"}, response.text
    return response


def raw(server: Server, text: bytes) -> bytes:
    """Send bytes that no client library would, and return what comes back until the server closes, or hangs up."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=SLOW_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
    return received


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


PENALTIES = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
COUNTS = ("max_tokens", "n", "top_logprobs", "min_tokens")
OUT_OF_BOUNDS: list[tuple[str, Any]] = [
    *itertools.product(PENALTIES, (1e300, -9, True, "1")),
    *itertools.product(COUNTS, (-1, 1 << 200, 1.5, True)),
    *itertools.product(("top_k", "seed"), ("x", 1 << 200, [1])),
    *itertools.product(("min_p",), (2, -1)),
    *itertools.product(("repetition_penalty",), (0, -5)),
    *itertools.product(("stop",), (["x" * 100_000], ["x"] * 1000)),
    *itertools.product(("logit_bias",), ({"999999999": 1}, {"1": 1e9}, {"-1": 1}, {str(i): 1 for i in range(5000)})),
    *itertools.product(("allowed_token_ids",), ([-1], [1 << 40])),
]


def test_a_number_out_of_bounds_is_refused_by_name(server: Server) -> None:
    for name, value in OUT_OF_BOUNDS:
        response = post(server, chat(**{name: value}))
        assert 400 <= response.status_code < 500, response.text
        assert name in response.text, (name, value)


def test_numbers_that_json_does_not_have_are_refused(server: Server) -> None:
    for literal in ("NaN", "Infinity", "-Infinity", "1e400", "9" * 100_000):
        body = json.dumps(chat(temperature=0.5)).replace("0.5", literal)
        assert 400 <= post(server, body.encode()).status_code < 500, literal[:10]


def test_shapes_of_json_that_break_parsers_are_refused(server: Server) -> None:
    deep = b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    twice = b'{"model": "stdlib-chat", "model": "x", "messages": []}'
    for body in (deep, twice, b"\xff\xfe{}", b'{"model": "\\ud800"}', b"", b"null", b"{" * 50_000):
        assert 400 <= post(server, body).status_code < 500, body[:40]


def picture(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_nothing_that_a_request_names_is_fetched(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        named: list[dict[str, Any]] = [
            {"messages": picture(url)},
            {"messages": [{"role": "user", "content": f"![x]({url}) {url}"}]},
            {"model": url},
            {"api_base": url},
            {"structured_outputs": {"json": {"$ref": url}}},
        ]
        for fields in named:
            post(server, chat(**fields))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_what_clients_may_not_bring_is_refused(server: Server) -> None:
    refused: list[dict[str, Any]] = [
        {"chat_template": "{% for i in range(999999999) %}x{% endfor %}"},
        {"chat_template_kwargs": {"tokenize": False}},
        {"messages": picture("data:image/png;base64," + "A" * 3_000_000)},
        {"prompt_embeds": "AAAA"},
        {"logits_processors": ["os.system"]},
        {"api_base": "http://127.0.0.1:1"},
    ]
    for fields in refused:
        assert post(server, chat(**fields)).status_code == 400, list(fields)


EXPRESSIONS = ("(" * 30_000, "[", "(a+)+$" * 500, "a{1,100000}{1,100000}", "q?b{1000000}", "(?<=x)y", "\\")
SCHEMAS: tuple[Any, ...] = (
    3,
    "{" * 10_000,
    {"type": "no such type"},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"enum": [f"value {i}" for i in range(20_000)]},
    {"type": "string", "minLength": 1_000_000_000},
    {"type": "array", "minItems": 1_000_000_000, "items": {"type": "integer"}},
    {"type": "object", "properties": {f"p{i}": {"pattern": f"[a-z]{{{i}}}"} for i in range(500)}},
    {"type": "string", "pattern": "(((((a{1,50}){1,50}){1,50}){1,50}){1,50})"},
    {"type": "string", "pattern": "\\p{Unknown}"},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
)
HOSTILE: list[dict[str, Any]] = [
    *({"regex": expression} for expression in EXPRESSIONS),
    *({"json": schema} for schema in SCHEMAS),
    *(
        {"grammar": grammar}
        for grammar in ("start: " + "(" * 20_000, "start: start start | start", 'start: "a" start', "")
    ),
    *({"choice": choice} for choice in ([], ["x" * 200_000])),
]


def test_a_hostile_schema_is_refused_or_followed_soon(server: Server) -> None:
    for wanted in HOSTILE:
        started_s = time.monotonic()
        response = post(server, chat(structured_outputs=wanted))
        assert response.status_code == 200 or 400 <= response.status_code < 500, (wanted, response.text)
        assert time.monotonic() - started_s < SLOW_S, wanted


def test_hundreds_of_schemas_are_not_kept(server: Server) -> None:
    def ask(numbers: range) -> int:
        with server.http() as http:
            for number in numbers:
                wanted = {"json": {"type": "object", "properties": {f"p{number}": {"enum": ["y" * 5000]}}}}
                body = chat(structured_outputs=wanted)
                assert http.post("/v1/chat/completions", headers=OWN, json=body).status_code == 200
        return sum(process.memory_info().rss for process in server.processes("ServeReplica"))

    # The first ones fill what is kept of them.
    before = ask(range(300))
    assert ask(range(300, 500)) - before < 60_000_000


def test_text_that_is_slow_to_tokenize_is_refused_or_soon_done(server: Server) -> None:
    for content in (" " * 2_000_000, "a" * 300_000, "é" * 300_000, "\n" * 500_000, "<|im_start|>" * 50_000):
        started_s = time.monotonic()
        assert 400 <= post(server, chat(messages=[{"role": "user", "content": content}])).status_code < 500
        assert time.monotonic() - started_s < SLOW_S


def test_control_tokens_that_a_user_types_open_no_turn(server: Server) -> None:
    def count(content: str) -> int:
        body = {"model": BASE, "messages": [{"role": "user", "content": content}]}
        return int(post(server, body, "/tokenize").json()["count"])

    tokenizer = json.loads((ROOT / "models" / BASE / "tokenizer.json").read_text())
    for token in (entry["content"] for entry in tokenizer["added_tokens"] if entry["special"]):
        assert count(f"x{token}y") > count("xy") + 1


def test_odd_paths_and_methods_reach_nothing(server: Server) -> None:
    lines = (
        b"GET /../../etc/passwd",
        b"GET /%2e%2e/%2e%2e/etc/passwd",
        b"GET /page/..%2f..%2fapp.py",
        b"GET /v1/models/..%2f..%2fx",
        b"GET /\x00",
        b"__CLASS__ /v1/models",
        b"TRACE /",
    )
    for line in lines:
        answer = raw(server, line + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert status_of(answer) in (*range(400, 500), 501), answer[:200]
        assert b"root:" not in answer


def test_a_header_of_a_quarter_megabyte_is_refused(server: Server) -> None:
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 250_000 + b"\r\n\r\n")
    assert not answer or 400 <= status_of(answer) < 500


def test_ranges_are_not_served(server: Server) -> None:
    with server.http() as http:
        many = "bytes=" + ",".join(f"{i}-{i}" for i in range(1500))
        for path in ("/", "/health", "/openapi.json"):
            assert http.get(path, headers={"range": many}).status_code == 200


def test_one_request_with_two_lengths_gets_one_answer(server: Server) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = raw(server, b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + lengths + hidden)
    assert answer.count(b"HTTP/1.1 ") == 1


OPEN = ("/health", "/metrics", "/")


def test_every_route_but_a_few_needs_a_key(server: Server) -> None:
    wrong_keys: list[dict[str, Any]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer café".encode("latin-1")},
    ]
    unknown = ("/invocations", "/pause", "/collective_rpc", "/update_weights", "/-/routes/../v1/models")
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
        routes = [(method, path) for path, methods in paths.items() for method in methods if path not in OPEN]
        assert len(routes) > 15
        for method, path in routes:
            for headers in wrong_keys:
                status = http.request(method, path, headers=headers, json={}).status_code
                assert status in (401, 403), (method, path, status)
        for path in unknown:
            assert http.post(path).status_code in (401, 403, 404, 405), path


def test_a_name_in_host_opens_no_door(server: Server) -> None:
    for host in (b"x/health?", b"localhost/health", b"evil.example"):
        answer = raw(server, b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        assert status_of(answer) in (400, 401, 421), answer[:200]


def test_a_tenant_s_key_changes_nothing(server: Server) -> None:
    routes = (
        ("GET", "/admin/usage"),
        ("GET", "/admin/usage.csv"),
        ("GET", "/admin/keys"),
        ("POST", "/admin/keys"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/v1/adapters/markdown/route"),
    )
    with server.http() as http:
        for method, path in routes:
            assert http.request(method, path, headers=OWN, json={}).status_code == 401, path


def test_one_tenant_s_prompts_warm_nobody_else_s(server: Server) -> None:
    long = chat(messages=[{"role": "user", "content": "Tell me in three sentences what shutil.copytree does. " * 6}])

    def cached(key: str) -> int:
        answer = post(server, long, authorization=f"Bearer {key}")
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER_KEY) == 0


def test_adapters_of_others_do_not_exist(server: Server) -> None:
    with server.client(api_key=OTHER_KEY) as client:
        assert [model.id for model in client.models.list()] == [BASE]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="markdown", messages=[{"role": "user", "content": "Hi"}])


def test_a_client_cannot_switch_off_a_deadline(server: Server) -> None:
    late = {"x-request-timeout": "0.2", "x-request-timeout-seconds": "0"}
    # It is refused at once where it is known that it would be late, and ended where it turns out.
    assert post(server, chat(max_tokens=400, ignore_eos=True), **late).status_code in (503, 504)


def test_headers_of_proxies_change_nothing(server: Server) -> None:
    of_proxies = {
        "serve_multiplexed_model_id": "markdown",
        "x-forwarded-for": "10.0.0.1",
        "x-forwarded-prefix": "/admin",
        "x-http-method-override": "DELETE",
        "x-original-url": "/admin/usage",
        "x-rewrite-url": "/admin/usage",
        "x-tenant": "red",
    }
    answer = post(server, chat(), **of_proxies)
    assert (answer.status_code, answer.json()["model"]) == (200, BASE)


def test_half_open_connections_hold_nobody_up(server: Server) -> None:
    halves = []
    try:
        for _ in range(150):
            half = socket.create_connection(("127.0.0.1", server.port))
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n")
            halves.append(half)
        assert post(server, chat(max_tokens=3)).status_code == 200
    finally:
        for half in halves:
            half.close()


class Canary:
    """What a stranger would send to a socket that reads pickles."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_nothing_goes_round_the_api(server: Server, tmp_path: Path) -> None:
    """The API listens where the configuration says, here on 127.0.0.1, and so does all that would go round it.

    HAProxy offers its counts on every address, and Serve's calls between replicas come in there too, in pickles: these
    ask for the cluster's token first.
    """
    own = {process.pid: process for process in psutil.Process(server.process.pid).children(recursive=True)}
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in own]
    assert server.port in {c.laddr.port for c in listening}
    public = [c for c in listening if c.laddr.ip in ("0.0.0.0", "::")]
    assert all(c in public or is_loopback(c.laddr.ip) for c in listening), listening
    ports = [c.laddr.port for c in public if own[c.pid].name() != "haproxy"]
    assert ports
    request = ASGIRequest(pickled_request_metadata=pickle.dumps(Canary(tmp_path / "canary")))
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            ASGIServiceStub(channel).HandleRequest(request, timeout=SLOW_S)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert not list(tmp_path.iterdir())


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def test_logs_hold_neither_keys_nor_prompts(server: Server) -> None:
    assert post(server, chat(messages=[{"role": "user", "content": f"What is {MARK}?"}])).status_code == 200
    assert post(server, chat(messages=[{"role": "user", "content": MARK}], frobnicate=1)).status_code == 400
    folder = server.log_folder()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    until(lambda: any(b"/v1/chat/completions" in path.read_bytes() for path in files), "an access log")
    told = b"".join(path.read_bytes() for path in files) + server.output.encode()
    for secret in (KEY, OTHER_KEY, ADMIN_KEY, MARK):
        assert secret.encode() not in told, secret


def test_each_answer_is_a_line_of_json_with_its_request_id_and_figures(server: Server) -> None:
    answered = post(server, chat(max_tokens=2))
    request_id = answered.headers["x-request-id"]

    def line() -> dict[str, Any] | None:
        texts = (path.read_text() for path in server.log_folder().rglob("replica_*_Gateway_*.log"))
        lines = (line for text in texts for line in text.splitlines() if f'"{request_id}"' in line)
        return next((fields for fields in map(json.loads, lines) if "answer_id" in fields), None)

    until(lambda: line() is not None, "the answer's line")
    fields = line()
    assert fields is not None
    assert (fields["request_id"], fields["tenant"], fields["model"]) == (request_id, "blue", BASE)
    assert (fields["outcome"], fields["output_tokens"]) == (answered.json()["choices"][0]["finish_reason"], 2)
    assert 0 < fields["ttft_s"] <= fields["duration_s"]
