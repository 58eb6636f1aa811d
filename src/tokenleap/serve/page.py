"""The page at `/`: a chat and the trace viewer, from the files in `static/`.

The page is a client of `/v1/chat/completions` like any other. Its files are read once, when the app
is made, so no request reads a file. A strict policy lets the page load these files and ask this
server, and nothing else.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from importlib import resources

from fastapi import APIRouter, Request, Response

__all__ = ["FILES", "router"]

_STATIC = resources.files("tokenleap.serve") / "static"
FILES = {
    "/" if entry.name == "index.html" else f"/page/{entry.name}": entry
    for entry in sorted(_STATIC.iterdir(), key=lambda entry: entry.name)
    if entry.name != "trace.html"  # a template of `tokenleap trace --html`
}
"""The files by their paths."""

_KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # ask again, with the tag below
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            "script-src 'self'",
            "style-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _router() -> APIRouter:
    """A route for each file of the page."""
    found = APIRouter(include_in_schema=False)
    for path, entry in FILES.items():
        respond = partial(_file, entry.read_bytes(), _KINDS[entry.name.rpartition(".")[2]])
        found.add_route(path, respond, methods=["GET", "HEAD"], include_in_schema=False)
    return found


async def _file(content: bytes, kind: str, request: Request) -> Response:
    """A file, or 304 if the browser has it."""
    headers = {**_HEADERS, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


router = _router()
