from __future__ import annotations

import pytest

from app.translation.bounds import check_count
from engine.errors import RequestError


def test_the_bound_itself_is_allowed_and_one_more_is_refused_by_name() -> None:
    check_count(0, 0, "items", field="messages")
    check_count(3, 3, "items", field="messages")
    with pytest.raises(RequestError) as refused:
        check_count(4, 3, "items", field="messages")
    assert refused.value.message == "'messages' accepts at most 3 items; 4 were given."
    assert refused.value.field == "messages"
