from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from loadtest.servers import NamedUrl, Server, find_server, models_of, refuse_twice
from tests.loadtest.scripted_server import MODELS, scripted_server


def ours(url: str) -> NamedUrl:
    return NamedUrl.parse(f"ours={url}")


def test_a_url_has_a_name_or_is_its_own() -> None:
    assert NamedUrl.parse("ours=http://h:1/") == NamedUrl(name="ours", url="http://h:1")
    assert NamedUrl.parse("http://[::1]:1") == NamedUrl(name="http://[::1]:1", url="http://[::1]:1")
    for wrong in ("ours", "127.0.0.1:8000", "a=ftp://h:1", "http://h:x", "http://"):
        with pytest.raises(ArgumentTypeError, match="http://host:port"):
            NamedUrl.parse(wrong)


def test_the_base_model_is_found_with_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server() as url:
        assert find_server(ours(url), None) == Server(name="ours", url=url, model="base")
        assert find_server(ours(url), "capitals").model == "capitals"
        monkeypatch.setitem(MODELS, "data", [{"id": "a", "max_model_len": 2048}, {"id": "b", "max_model_len": 9}])
        assert find_server(ours(url), None).context_tokens == 2048
        assert find_server(ours(url), "b").context_tokens == 9
        assert find_server(ours(url), "unlisted").context_tokens is None


def test_models_that_only_embed_are_not_asked_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "data", [{"id": "e", "task": "embed"}, {"id": "g", "task": "generate"}])
    with scripted_server() as url:
        assert find_server(ours(url), None).model == "g"
        assert [model.name for model in models_of(ours(url))] == ["g"]


def test_a_dead_server_is_said() -> None:
    with scripted_server() as url:
        pass
    with pytest.raises(SystemExit, match="ours does not answer"):
        find_server(ours(url), None)
    with pytest.raises(SystemExit, match=f"{url} does not answer"):
        find_server(NamedUrl.parse(url), None)


def test_a_server_without_a_base_model_wants_its_model_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "data", [])
    with scripted_server() as url:
        with pytest.raises(SystemExit, match="ours lists no base model"):
            find_server(ours(url), None)
        assert find_server(ours(url), "m").model == "m"


def test_two_servers_of_one_name_are_refused() -> None:
    """One of them was asked twice, and the other never."""
    refuse_twice(["a", "b"])
    with pytest.raises(SystemExit, match="named 'a'"):
        refuse_twice(["a", "b", "a"])
