from __future__ import annotations
from .source import Source


def check(source: Source) -> None:
    pass
