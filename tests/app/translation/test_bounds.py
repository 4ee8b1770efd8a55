from __future__ import annotations

import pytest

from app.settings import LimitSettings
from app.translation.bounds import check_count, check_json
from engine.errors import RequestError


def test_the_bound_itself_is_allowed_and_one_more_is_refused_by_name() -> None:
    check_count(0, 0, "items", field="messages")
    check_count(3, 3, "items", field="messages")
    with pytest.raises(RequestError) as refused:
        check_count(4, 3, "items", field="messages")
    assert refused.value.message == "'messages' accepts at most 3 items; 4 were given."
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    ("value", "words"),
    [({"a": [1234]}, "accepts at most 12 characters; 13 were given."), ({"a": [[1]]}, "is nested 3 levels deep")],
)
def test_json_may_have_so_many_characters_and_levels_and_no_more(value: object, words: str) -> None:
    limits = LimitSettings(max_schema_depth=2, max_schema_chars=12)
    assert check_json({"a": [123]}, limits, field="tools") == 12
    with pytest.raises(RequestError, match=words):
        check_json(value, limits, field="tools")
