from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from app.http.errors import ApiError
from app.schemas.chat import ChatCompletionRequest, Message
from app.schemas.common import StreamOptions
from app.schemas.completions import CompletionRequest
from app.translation.chunks import ChatFrames, CompletionFrames
from app.translation.render import ResponseHead
from app.translation.streaming import ChoiceEvent
from deployments.answer_events import EndReason, Finished, GenerationEvent, Started, TextDelta
from tests.app.translation.test_streaming import STARTED

HEAD = ResponseHead(response_id="chatcmpl-1", created_s=2, model="m")
ASKED = CompletionRequest(model="m", prompt="?")
FINISHED = Finished(reason=EndReason.LENGTH, num_prompt_tokens=3, num_completion_tokens=4, num_cached_tokens=2)


def chat_frames(options: StreamOptions | None = None) -> ChatFrames:
    asked = ChatCompletionRequest(model="m", messages=[Message(role="user", content="?")], stream_options=options)
    return ChatFrames(HEAD, asked)


def test_a_chat_stream_is_this_to_the_byte() -> None:
    frames = chat_frames(StreamOptions(include_usage=True))
    started = Started(num_prompt_tokens=3, num_cached_tokens=2)
    written = b"".join(frames.event(ChoiceEvent(0, event)) for event in (started, TextDelta(text='"é\n'), FINISHED))
    prefix = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":2,"model":"m","choices":['
    assert (written + frames.closing()).decode() == (
        f'data: {prefix}{{"index":0,"delta":{{"role":"assistant","content":"","refusal":null}},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        f'data: {prefix}{{"index":0,"delta":{{"content":"\\"é\\n"}},"logprobs":null,"finish_reason":null}}],'
        '"usage":null}\n\n'
        f'data: {prefix}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}],"usage":null}}\n\n'
        f'data: {prefix}],"usage":{{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":2,"audio_tokens":0},'
        '"completion_tokens_details":{"reasoning_tokens":0,"audio_tokens":0,"accepted_prediction_tokens":0,'
        '"rejected_prediction_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_the_role_comes_once_for_each_choice_even_where_the_first_event_is_the_last() -> None:
    frames = chat_frames()
    assert frames.event(ChoiceEvent(0, FINISHED)).count(b'"role":"assistant"') == 1
    assert frames.event(ChoiceEvent(1, TextDelta(text="a"))).count(b'"role":"assistant"') == 1
    assert frames.event(ChoiceEvent(1, TextDelta(text="b"))).count(b'"role":"assistant"') == 0


def test_a_completion_stream_opens_with_text() -> None:
    frames = CompletionFrames(HEAD, ASKED)
    assert frames.event(ChoiceEvent(0, STARTED)) == b""
    assert b'"text":"a"' in frames.event(ChoiceEvent(0, TextDelta(text="a")))
    assert frames.closing() == b"data: [DONE]\n\n"


def test_an_error_is_one_frame_whatever_text_it_holds() -> None:
    assert chat_frames().failure(ApiError(500, "a\nb\ud800")).count(b"\n") == 2


def chunks(frames: ChatFrames, *events: GenerationEvent) -> list[dict[str, Any]]:
    written = b"".join(frames.event(ChoiceEvent(0, event)) for event in events) + frames.closing()
    return [json.loads(frame[6:]) for frame in written.decode().split("\n\n") if frame and not frame.endswith("[DONE]")]


def test_every_chunk_counts_so_far_where_that_is_asked_for() -> None:
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    found = chunks(
        chat_frames(options),
        replace(STARTED, num_prompt_tokens=3),
        TextDelta(text="a", num_tokens=2),
        TextDelta(text="b", num_tokens=5),
        FINISHED,
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [0, 2, 5, *[FINISHED.num_completion_tokens] * 2]
    assert {chunk["usage"]["prompt_tokens"] for chunk in found} == {3}


def test_padded_chunks_do_not_tell_how_long_their_text_is() -> None:
    def sizes(text: str) -> int:
        chunk = chunks(chat_frames(StreamOptions(include_obfuscation=True)), STARTED, TextDelta(text=text))[1]
        assert chunk["obfuscation"]
        return len(json.dumps(chunk))

    assert len({sizes("a" * length) for length in range(1, 20)}) <= 2


def test_chunks_tell_the_fingerprint_once_it_is_known() -> None:
    started = replace(STARTED, fingerprint="fp_1")
    found = chunks(chat_frames(), started, TextDelta(text="a"), FINISHED)
    assert {chunk["system_fingerprint"] for chunk in found} == {"fp_1"}
