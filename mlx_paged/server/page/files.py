"""The page's own files, read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePath

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class PageFile:
    """One file as it is served."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{sha256(self.content).hexdigest()[:32]}"'


@cache
def page_files() -> dict[str, PageFile]:
    """Every file in `static/`, by name."""
    return {
        path.name: PageFile(path.read_bytes(), MEDIA_TYPES[suffix])
        for path in (files("mlx_paged.server.page") / "static").iterdir()
        if (suffix := PurePath(path.name).suffix) in MEDIA_TYPES
    }
