"""What can be known of a store's URL without a connection to it."""

from __future__ import annotations

import traceback

import pytest

from deployments.accounts.urls import check_urls
from deployments.config import AccountsConfig
from engine.errors import ConfigError


def check(**urls: str) -> None:
    check_urls(AccountsConfig(spool_folder="spool", **{"database_url": "sqlite://", **urls}))


@pytest.mark.parametrize(
    ("field", "url", "words"),
    [
        ("limits_url", "foo://h", "unknown storage scheme"),
        ("limits_url", "redis://h:port", "Port could not be cast"),
        ("limits_url", "memcached://h:1", "'pymemcache' prerequisite not available"),
        ("limits_url", "async+memory://", "not supported; use 'memory'"),
        ("limits_url", "async+redis+cluster://h:1", r"not supported; use 'redis\+cluster'"),
        ("database_url", "nonsense", "Could not parse SQLAlchemy URL"),
        ("database_url", "postgresql+asyncpg://h/usage", "No module named 'asyncpg'"),
        ("database_url", "postgresql://h:port/usage", "'port'"),
    ],
)
def test_what_no_store_can_have_is_one_line(field: str, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^args\.accounts\.{field}: .*{words}.*$"):
        check(**{field: url})


@pytest.mark.parametrize(
    "url",
    ["rediss2://:secret@h:1", "redis2:/user:a@b/secret@h:1", "redis://:secret@h:port", "redis://user:secret/a@h:1"],
)
def test_what_is_wrong_with_a_url_is_said_without_its_password(url: str) -> None:
    """It was printed, and under `serve run` it was in the status and the log of Serve's controller."""
    with pytest.raises(ConfigError) as caught:
        check(limits_url=url)
    assert str(caught.value).startswith("args.accounts.limits_url: ")
    assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["memory://", "redis://h.invalid:1", "redis+cluster://h.invalid:1"])
def test_no_store_is_connected_to(url: str) -> None:
    check(limits_url=url)
