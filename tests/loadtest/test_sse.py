from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import EventLines


def payloads(stream: bytes) -> list[str]:
    lines = EventLines()
    return [payload for line in stream.splitlines(keepends=True) if (payload := lines.feed(line)) is not None]


def test_an_event_ends_with_its_blank_line() -> None:
    assert payloads(b"data: a\n\ndata: b\n\n") == ["a", "b"]
    assert payloads(b"data: a\r\n\r\n") == ["a"]


def test_an_event_that_is_not_closed_is_dropped() -> None:
    assert payloads(b"data: a\n\ndata: b\n") == ["a"]


def test_lines_of_one_event_are_joined_and_other_fields_ignored() -> None:
    assert payloads(b": ping\nevent: x\nid: 1\ndata: a\ndata:b\nretry: 5\n\n: only a comment\n\n") == ["a\nb"]


def test_one_leading_space_belongs_to_the_format() -> None:
    assert payloads(b"data:  a \n\n") == [" a "]


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]))))
def test_what_a_server_frames_comes_out(texts: list[str]) -> None:
    lines = EventLines()
    found = []
    for text in texts:
        found += [lines.feed(f"data: {text}\n".encode()), lines.feed(b"\n")]
    assert [payload for payload in found if payload is not None] == texts
