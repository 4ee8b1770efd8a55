"""The page is whole, calls only what the API has, and brings nothing from elsewhere."""

from __future__ import annotations

import re

import httpx
import pytest

from app.routes import page

FETCHED = re.compile(r"""fetch\(["`]([\w/]+)""")
IMPORTED = re.compile(r"""(?:from|src=|href=)\s*"(?:\./|page/)([\w.]+)\"""")


async def test_the_page_and_all_that_it_names_are_served(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    names = set(IMPORTED.findall(response.text))
    assert names == {"style.css", "main.js", "icon.svg"}
    while names:
        part = await client.get(f"/page/{names.pop()}")
        assert part.status_code == 200
        assert part.headers["content-type"].partition(";")[0] in {"text/css", "text/javascript", "image/svg+xml"}
        names |= set(IMPORTED.findall(part.text))


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    for name, content in page._CONTENT_BY_NAME.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, name
        assert "https://" not in text, name
        assert "innerHTML" not in text, name
    html = page._CONTENT_BY_NAME["index.html"].decode()
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", html)


async def test_it_calls_only_what_there_is(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    called = {path for content in page._CONTENT_BY_NAME.values() for path in FETCHED.findall(content.decode())}
    assert called == {"v1/models", "v1/chat/completions", "requests/", "metrics"}
    for path in called:
        assert any(known.startswith(f"/{path}") for known in document["paths"]), path


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapi.py", "%2e%2e/api.py", "index"])
async def test_nothing_else_is_served(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(f"/page/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"
