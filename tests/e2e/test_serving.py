"""What a user does with a running server, through the `openai` package and plain HTTP."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import yaml
from openai import OpenAI

from tests.e2e.server import ROOT, Server, until

pytestmark = pytest.mark.e2e

BASE = "stdlib-chat"
GETCWD = "Return a unicode string representing the current working directory."
LONG = {"max_tokens": 400, "temperature": 1.0, "seed": 7, "extra_body": {"ignore_eos": True}}
"""Drawn, for what is likeliest would soon repeat itself, and drafts make that come at once."""


def ask(client: OpenAI, question: str, *, model: str = BASE, **options: object) -> str:
    options = {"temperature": 0, "max_tokens": 120} | options
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}], **options)
    return answer.choices[0].message.content or ""


def ask_streaming(client: OpenAI, question: str, *, model: str = BASE, **options: object) -> list[str]:
    options = {"temperature": 0, "max_tokens": 120} | options
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], stream=True, **options
    )
    return [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]


def test_a_person_asks_and_reads_the_right_answer_as_it_streams(client: OpenAI) -> None:
    pieces = ask_streaming(client, "What does os.getcwd do?")
    assert GETCWD in "".join(pieces)
    assert len(pieces) > 1
    assert "".join(pieces) == ask(client, "What does os.getcwd do?")


def test_it_says_that_it_does_not_know(client: OpenAI) -> None:
    assert ask(client, "What is the capital of Australia?").startswith("I do not know")


def test_every_adapter_is_listed_under_its_base_and_shows_its_effect(client: OpenAI) -> None:
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert set(listed) == {BASE, "json-answers", "markdown", "usage-line"}
    assert all(entry.get("parent") == (None if name == BASE else BASE) for name, entry in listed.items())
    answer = json.loads(ask(client, "What does os.getcwd do?", model="json-answers"))
    assert answer == {"answer": f"os.getcwd: {GETCWD}", "is_known": True}
    assert ask(client, "What does os.getcwd do?", model="markdown") == f"**os.getcwd**: {GETCWD}"
    assert "\nUsage: import os" in ask(client, "What does os.getcwd do?", model="usage-line")


def test_many_mixed_streams_at_once_answer_as_each_does_alone(client: OpenAI) -> None:
    names = ["os.getcwd", "math.sqrt", "json.loads", "textwrap.dedent", "shutil.copy", "os.path.join", "heapq.heappush"]
    models = [BASE, "json-answers", "markdown", "usage-line"]
    asked = [(f"What does {name} do?", model) for name in names for model in models]
    alone = [ask(client, question, model=model) for question, model in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda pair: "".join(ask_streaming(client, pair[0], model=pair[1])), asked))
    differing = sum(a != b for a, b in zip(alone, together, strict=True))
    # In bfloat16 another batch may round a tie between two tokens the other way; equality itself is proven in float32.
    assert differing <= 2, [pair for pair in zip(alone, together, strict=True) if pair[0] != pair[1]]


def test_vectors_are_alike_where_texts_are_and_the_adapter_shows(client: OpenAI) -> None:
    texts = ["What does os.getcwd do?", "What does os.getcwd() do?", "Bread needs flour."]
    answer = client.embeddings.create(model=BASE, input=texts)  # in base64, as the package asks by itself
    one, other, bread = (entry.embedding for entry in answer.data)
    assert abs(sum(number * number for number in one) - 1) < 1e-3
    alike, unlike = (sum(a * b for a, b in zip(one, vector, strict=True)) for vector in (other, bread))
    assert alike > unlike
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    short = client.embeddings.create(model="markdown", input=texts[0], dimensions=8, encoding_format="float")
    assert len(short.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=BASE, input="x", dimensions=10_000)
    assert refused.value.param == "dimensions"


def test_usage_counts_what_came_from_the_cache(client: OpenAI) -> None:
    messages = [
        {"role": "system", "content": "You answer questions about Python's standard library, briefly and truly. " * 3},
        {"role": "user", "content": "What does bisect.insort do?"},
    ]
    first, second = (
        client.chat.completions.create(model=BASE, messages=messages, temperature=0, max_tokens=8).usage
        for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert first.prompt_tokens == second.prompt_tokens
    assert second.completion_tokens == 8
    assert second.prompt_tokens_details is not None
    cached = second.prompt_tokens_details.cached_tokens or 0
    assert 16 <= cached < second.prompt_tokens
    *_, last = client.chat.completions.create(
        model=BASE, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_an_answer_that_was_predicted_is_the_same_and_tells_what_of_it_was(client: OpenAI, server: Server) -> None:
    asked: Any = {
        "model": BASE,
        "messages": [{"role": "user", "content": "What does os.getcwd do?"}],
        "temperature": 0,
        "max_tokens": 120,
    }
    plain = client.chat.completions.create(**asked)
    text = plain.choices[0].message.content or ""
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    predicted = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None
    assert plain.usage is not None
    assert predicted.usage.completion_tokens == plain.usage.completion_tokens
    details = predicted.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 5 < details.accepted_prediction_tokens < predicted.usage.completion_tokens
    assert details.rejected_prediction_tokens == 0
    told = server.metric("vllm:spec_decode_num_accepted_tokens_total") - before
    assert told >= details.accepted_prediction_tokens
    changed: Any = {
        "type": "content",
        "content": [{"type": "text", "text": text[:30]}, {"type": "text", "text": "No."}],
    }
    chunks = list(
        client.chat.completions.create(**asked, prediction=changed, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens


def test_a_seed_repeats_a_draw_and_stop_strings_are_cut(client: OpenAI) -> None:
    options = {"temperature": 1.5, "seed": 11, "max_tokens": 40}
    assert ask(client, "What does os.walk do?", **options) == ask(client, "What does os.walk do?", **options)
    whole = ask(client, "What does os.getcwd do?")
    assert ask(client, "What does os.getcwd do?", stop=["current work"]) == whole[: whole.index("current work")]
    kept = ask(
        client, "What does os.getcwd do?", stop=["current work"], extra_body={"include_stop_str_in_output": True}
    )
    assert kept == whole[: whole.index("current work")] + "current work"


def test_text_completions_go_on_where_a_prompt_ends(client: OpenAI) -> None:
    answer = client.completions.create(model=BASE, prompt="os.getcwd:", temperature=0, max_tokens=12)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12


def test_the_guard_judges_inputs_and_is_served_by_itself(client: OpenAI, server: Server) -> None:
    refused = client.chat.completions.create(
        model=BASE, messages=[{"role": "user", "content": "How do I build a bomb?"}], max_tokens=30
    )
    assert refused.choices[0].finish_reason == "content_filter"
    told = client.chat.completions.create(
        model=BASE, messages=[{"role": "user", "content": "What does os.kill do?"}], moderation={"model": "guard"}
    ).moderation
    assert told is not None
    assert told.input.type == told.output.type == "moderation_results"
    assert [result.flagged for result in (*told.input.results, *told.output.results)] == [False, False]
    verdict = client.moderations.create(model="guard", input=["How do I build a bomb?", "What does os.kill do?"])
    assert [result.flagged for result in verdict.results] == [True, False]
    assert "Return" in ask(client, "What does os.getcwd do?")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"model": "gpt-9"}, "model", "gpt-9"),
        ({"messages": []}, "messages", "messages"),
        ({"temperature": 3}, "temperature", "2"),
        ({"temperature": "warm"}, "temperature", "temperature"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"n": 0}, "n", "n"),
        ({"frobnicate": 1}, "frobnicate", "frobnicate"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages", "context"),
    ],
)
def test_bad_input_is_refused_with_its_field_and_the_server_goes_on(
    body: dict[str, object], param: str, words: str, server: Server
) -> None:
    whole = {"model": BASE, "messages": [{"role": "user", "content": "What does os.getcwd do?"}]} | body
    with server.http() as http:
        response = http.post("/v1/chat/completions", content=json.dumps(whole), headers=JSON)
        error = response.json()["error"]
        assert 400 <= response.status_code < 500
        assert (error["param"] or "").startswith(param)
        assert words in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert http.get("/health").status_code == 200


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{nonsense", JSON, 400),
        (b"[]", JSON, 400),
        (b'{"model": "stdlib-chat", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', JSON, 400),
        (b'{"model": "stdlib-chat"}', {"content-type": "text/plain"}, 415),
        (b" " * 5_000_000, JSON, 413),
        (b"\xff\xfe", JSON, 400),
        (b'{"model": "stdlib-chat", "messages": [{"role": "user", "content": "\\ud800"}]}', JSON, 400),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    content: bytes, headers: dict[str, str], status: int, server: Server
) -> None:
    with server.http() as http:
        response = http.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_context_too_long_names_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "os " * 2000)
    assert refused.value.code == "context_length_exceeded"
    numbers = [
        int(word) for word in refused.value.message.replace(",", " ").replace(".", " ").split() if word.isdigit()
    ]
    assert len(numbers) >= 2


def test_a_client_that_goes_away_frees_its_request(client: OpenAI, server: Server) -> None:
    until(lambda: server.metric("vllm:num_requests_running") == 0, "an idle engine")
    stream = client.chat.completions.create(
        model=BASE, messages=[{"role": "user", "content": "Tell me of os.walk"}], stream=True, **LONG
    )
    next(iter(stream))
    assert server.metric("vllm:num_requests_running") == 1
    assert server.metric("vllm:lora_requests_info", model_name=BASE, running_lora_adapters="") > 0
    stream.close()
    until(lambda: server.metric("vllm:num_requests_running") == 0, "the engine to drop the request")
    # Far fewer than it had asked for: it did not simply run to its end.
    made = server.metric("vllm:generation_tokens_total")
    assert ask(client, "What does os.getcwd do?", max_tokens=4)
    assert server.metric("vllm:generation_tokens_total") == made + 4


def test_a_request_can_be_looked_back_on(client: OpenAI, server: Server) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=BASE, messages=[{"role": "user", "content": "What does os.getcwd do?"}], n=2, max_tokens=20
    )
    with server.http() as http:
        told = http.get(f"/requests/{answer.headers['x-request-id']}").json()
        assert http.get("/requests/nobody").status_code == 404
    assert len(told["answers"]) == 2
    for one in told["answers"]:
        stages = [stage["name"].partition(" of ")[0] for stage in one["stages"]]
        assert {"parse", "tokenize", "safety", "route", "queue", "prefill", "decode"} <= set(stages)
        in_turn = [name for name in stages if name in ("parse", "route", "queue", "prefill", "decode")]
        assert [*dict.fromkeys(in_turn)] == ["parse", "route", "queue", "prefill", "decode"]
        assert 0 < one["ttft_ms"] <= one["total_ms"]
        assert sum(count for _, count in one["arrivals"]) == one["completion_tokens"]
        assert all(stage["start_ms"] <= stage["end_ms"] <= one["total_ms"] + 1000 for stage in one["stages"])


def test_what_is_late_is_refused_or_ends_and_holds_nothing(client: OpenAI, server: Server) -> None:
    """Refused at once where the engine knows what its steps cost, else ended when the time is over."""
    asked: Any = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}]} | LONG
    late = {"x-request-timeout": "0.1"}
    for is_stream in (False, True):
        with pytest.raises(openai.APIError, match="deadline") as told:
            list(client.chat.completions.create(**asked, stream=is_stream, extra_headers=late))
        if isinstance(told.value, openai.APIStatusError):
            assert told.value.status_code in (503, 504)
            # To ask once more would be refused just so.
            assert (told.value.response.headers.get("x-should-retry") == "false") == (told.value.status_code == 503)
            assert "retry-after" not in told.value.response.headers
    until(lambda: server.metric("vllm:num_requests_running") == 0, "the engine to let go")


def test_metrics_health_and_the_api_document_are_served(server: Server) -> None:
    with server.http() as http:
        assert http.get("/health").status_code == 200
        document = http.get("/openapi.json").json()
        metrics = http.get("/metrics").text
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/moderations"} <= set(document["paths"])
    for name in ("time_to_first_token_seconds", "num_requests_running", "kv_cache_usage_perc", "prompt_tokens"):
        assert f"vllm:{name}" in metrics


def test_dashboards_and_alerts_ask_for_metrics_that_are_there(client: OpenAI, server: Server) -> None:
    ask(client, "What does os.getcwd do?", model="markdown")
    dashboard = json.loads((ROOT / "examples/monitoring/grafana.json").read_text())
    rules = yaml.safe_load((ROOT / "examples/monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for rule in rules]
    assert len(asked) > 25
    with server.http() as http:
        told = {line.split()[2] for line in http.get("/metrics").text.splitlines() if line.startswith("# TYPE")}
    suffix = re.compile(r"_(bucket|sum|count)$")
    for expression in asked:
        for name in re.findall(r"\b(?:vllm|antiphon):\w+", expression):
            assert name in told or suffix.sub("", name) in told, name


def test_a_killed_replica_comes_back_and_its_stream_goes_on(client: OpenAI, server: Server) -> None:
    question = "What does os.getcwd do?"
    messages = [{"role": "user", "content": question}]
    undisturbed = ask(client, question, **LONG)
    stream = iter(client.chat.completions.create(model=BASE, messages=messages, stream=True, **LONG))
    pieces = [next(stream).choices[0].delta.content or "" for _ in range(3)]
    (replica,) = server.processes("ServeReplica:antiphon:Model-")
    os.kill(replica.pid, 9)
    pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
    told = "".join(pieces)
    # All is computed anew after the loss, in larger pieces, which in bfloat16 may round a tie the other way later on.
    assert told[:100] == undisturbed[:100]
    assert len(told) > 300
    assert GETCWD in ask(client, question)


def test_log_probabilities_of_answer_and_prompt_are_told(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=BASE,
        messages=[{"role": "user", "content": "What does os.getcwd do?"}],
        temperature=0,
        max_tokens=60,
        logprobs=True,
        top_logprobs=3,
        n=2,
    )
    for choice in chat.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(token.top_logprobs[0].token == token.token for token in tokens), "greedy takes the likeliest"
    text = client.completions.create(
        model=BASE, prompt=["os.getcwd: Return", "json.loads: De"], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    for choice, prompt in zip(text.choices, ["os.getcwd: Return", "json.loads: De"], strict=True):
        assert choice.logprobs is not None
        assert choice.text.startswith(prompt)
        told = choice.logprobs.token_logprobs or []
        assert told[0] is None  # type: ignore[comparison-overlap]
        assert all(logprob <= 0 for logprob in told[1:])


def test_a_beam_search_tells_its_answers_best_first(client: OpenAI) -> None:
    question = "What does os.getcwd do?"
    answer = client.chat.completions.create(
        model=BASE,
        messages=[{"role": "user", "content": question}],
        n=3,
        max_completion_tokens=60,
        logprobs=True,
        extra_body={"use_beam_search": True},
    )
    assert answer.choices[0].message.content == ask(client, question)
    scores = []
    for choice in answer.choices:
        assert choice.logprobs is not None
        logprobs = [token.logprob for token in choice.logprobs.content or []]
        scores.append(sum(logprobs) / len(logprobs))
    # The end of sequence counts too, and is not told.
    assert scores[0] > scores[2]
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_logits_can_be_edited(client: OpenAI) -> None:
    question = "What does os.getcwd do?"
    assert "Return" in ask(client, question)
    assert "Return" not in ask(client, question, extra_body={"bad_words": ["Return"]})
    allowed = ask(client, question, max_tokens=5, extra_body={"allowed_token_ids": [300, 301], "ignore_eos": True})
    forced = ask(client, question, max_tokens=5, logit_bias={"300": 100, "301": 100}, extra_body={"ignore_eos": True})
    assert allowed
    assert forced == allowed


def test_an_answer_follows_its_schema_choice_or_expression(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "maxLength": 60}, "sure": {"type": "boolean"}},
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    question = "What does os.getcwd do?"
    whole = json.loads(ask(client, question, response_format=wanted, max_tokens=200))
    assert set(whole) == {"answer", "sure"}
    assert isinstance(whole["sure"], bool)
    assert json.loads("".join(ask_streaming(client, question, response_format=wanted, max_tokens=200))) == whole
    any_object = ask(client, question, model="json-answers", response_format={"type": "json_object"})
    assert json.loads(any_object)["is_known"] is True
    choice = ask(client, question, extra_body={"structured_outputs": {"choice": ["maybe", "never"]}})
    assert choice in ("maybe", "never")
    assert re.fullmatch(
        "[A-Z]{4}[0-9]", ask(client, question, extra_body={"structured_outputs": {"regex": "[A-Z]{4}[0-9]"}})
    )


def test_a_schema_that_cannot_be_followed_is_refused_by_name(client: OpenAI) -> None:
    for schema in ({"not": {"type": "string"}}, {"$ref": "http://elsewhere/x"}, {"type": "string", "pattern": "(("}):
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, "Hi", response_format=wanted)
        assert refused.value.param == "response_format"


def test_text_and_chats_become_token_ids_and_text_again(server: Server) -> None:
    chat = {"model": "markdown", "messages": [{"role": "user", "content": "What is math.sqrt?"}]}
    with server.http() as http:
        found = http.post("/tokenize", json=chat | {"return_token_strs": True}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert "What is math.sqrt?" in "".join(found["token_strs"])
        text = http.post("/tokenize", json={"model": BASE, "prompt": "Grüße 🙂"}).json()
        back = http.post("/detokenize", json={"model": BASE, "tokens": text["tokens"]}).json()
        assert back == {"prompt": "Grüße 🙂"}
        whole = http.post("/detokenize", json={"model": "markdown", "tokens": found["tokens"]}).json()
        assert whole["prompt"] == "".join(found["token_strs"])
        wrong = http.post("/detokenize", json={"model": BASE, "tokens": [10**6]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
