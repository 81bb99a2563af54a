"""The files of the page at `/ui`, read once and served with a Content-Security-Policy that allows only this origin."""

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ROOT: Final = "/ui"
FOLDER: Final = Path(__file__).with_name("static")
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
INLINE_SCRIPT: Final = re.compile(rb"<script type=\"importmap\">(.*?)</script>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str


def read_files() -> Mapping[str, PageFile]:
    files = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in TYPES:
            content = path.read_bytes()
            name = path.relative_to(FOLDER).as_posix()
            file = PageFile(content, TYPES[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')
            files[ROOT if name == INDEX else f"{ROOT}/{name}"] = file
    return files


FILES: Final = read_files()
PATHS: Final = frozenset({*FILES, f"{ROOT}/"})  # open without an API key


def security_headers(index: bytes) -> Mapping[str, str]:
    """Return the headers. The import map in `index` is the only inline script that may run."""
    hashes = [f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in INLINE_SCRIPT.findall(index)]
    policy = [
        "default-src 'none'",
        " ".join(["script-src 'self'", *hashes]),
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), microphone=(), geolocation=()",
    }


HEADERS: Final = security_headers(FILES[ROOT].content)


async def serve_file(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == f"{ROOT}/":  # its relative links start at the parent
        await Response(status_code=308, headers={"location": f"..{ROOT}"})(scope, receive, send)
        return
    file = FILES[scope["path"]]
    headers = {**HEADERS, "etag": file.etag, "cache-control": "no-cache"}
    if file.etag in (Headers(scope=scope).get("if-none-match") or ""):
        response = Response(status_code=304, headers=headers)
    else:
        response = Response(file.content, headers=headers)
        response.headers["content-type"] = file.media_type
    await response(scope, receive, send)
