from __future__ import annotations
from .compiler import Compiler
from .source import Source


def check(source: Source, compiler: Compiler) -> None:
    pass
