from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.settings import Settings

MODEL = {"name": "base", "path": "models/base"}


def test_hosts_are_names_or_all_below_one() -> None:
    names = ("localhost", "A.Example", "*.inner.example", "10.0.0.7", "my_host-1")
    assert Settings.model_validate({"models": [MODEL], "allowed_hosts": names}).allowed_hosts == names


@pytest.mark.parametrize(
    "name", ["https://a.example", "a.example:80", "a.example/v1", "a.example.", "*", "a.*.example", "ä.example", ""]
)
def test_what_could_never_match_is_no_host(name: str) -> None:
    with pytest.raises(ValidationError, match="is not a host name" if name else "at least 1 character"):
        Settings.model_validate({"models": [MODEL], "allowed_hosts": ["a.example", name]})
