"""`GET /`: the page, a handful of constant files; it asks the API as any client does."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from app.http.errors import ApiError

TYPE_BY_SUFFIX = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from elsewhere, nothing inline, and in nobody's frame.
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

# Read once: no request names a path.
_CONTENT_BY_NAME = {
    entry.name: entry.read_bytes()
    for entry in files("app").joinpath("page").iterdir()
    if entry.name.rpartition(".")[2] in TYPE_BY_SUFFIX
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    """Return what the page is made of."""
    if name not in _CONTENT_BY_NAME:
        raise ApiError(404, "The page has no such file.", code="unknown_url")
    return _file(name)


def _file(name: str) -> Response:
    return Response(_CONTENT_BY_NAME[name], headers=HEADERS | {"content-type": TYPE_BY_SUFFIX[name.rpartition(".")[2]]})
