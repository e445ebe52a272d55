"""What Metal lacks, or asks for, and a C++ compiler does not notice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from .fault import KernelFault
from .source import Source

# Metal Shading Language Specification, "Metal and C++".
_LACKING = [
    (r"\bdouble\b", "`double` does not exist"),
    (r"\blong\s+long\b", "`long long` does not exist, `long` has 64 bits"),
    (r"\bnew\b|\bdelete\b|\bmalloc\s*\(|\bfree\s*\(", "there is no allocation"),
    (r"\bvirtual\b|\bdynamic_cast\b|\btypeid\b", "there are no virtual functions"),
    (r"\btry\b|\bcatch\b|\bthrow\b", "there are no exceptions"),
    (r"\bgoto\b", "there is no goto"),
    (r"\bthread_local\b|\bregister\b|\basm\b", "`{}` does not exist"),
    (r"\bstd\s*::", "there is no C++ standard library"),
    (r"\bprintf\s*\(", "there is no printf"),
    (r"\[\s*[&=]?\s*\]\s*(?:\([^()]*\)\s*)?\{", "there are no lambdas"),
    (r"\(\s*(?:thread\s*)?\*\s*\w+\s*\)\s*\(", "there are no function pointers"),
    (r"#\s*include\s*(?:\"|<(?!metal_))", "only Metal's own headers can be included"),
]
_BUILTIN = (
    r"(?:void|bool|size_t|b?float16_t|u?int(?:8|16|32|64)_t"
    r"|(?:packed_)?(?:float|half|bfloat|u?char|u?short|u?int|u?long)[234]?"
    r"|(?:metal::)?(?:vec|simdgroup_matrix|atomic)\s*<[^<>;]*>|atomic_\w+|simdgroup_\w+8x8)"
)
_SPACE = r"\b(?:device|constant|threadgroup|thread)\b"
_QUALIFIER = r"\b(?:const|volatile|device|constant|threadgroup|thread)\b"
_NAMED_TYPE = re.compile(
    r"\b(?:typename|class|struct)\s+(\w+)|\busing\s+(\w+)\s*=|\btypedef\s[^;]*?(\w+)\s*;"
)
_FUNCTION = re.compile(r"\b(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?\{")
_KEYWORDS = {"if", "for", "while", "switch", "return", "do"}


def check(source: Source) -> None:
    """Raises KernelFault for the first thing that Metal would refuse."""
    code = without_comments(source.text)
    for at, message in [*_missing_features(code), *_unqualified_pointers(code), *_recursion(code)]:
        place = source.place(code.count("\n", 0, at) + 1)
        raise KernelFault("not in Metal", source.kernel, f"is refused: {message}", place)


def without_comments(text: str) -> str:
    """`text` with blanks for comments and the insides of strings, every line where it was."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n\"]", " ", found[0])

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", blank, text, flags=re.DOTALL)


def _missing_features(code: str) -> Iterator[tuple[int, str]]:
    for pattern, message in _LACKING:
        for found in re.finditer(pattern, code):
            yield found.start(), message.format(found[0])


def _unqualified_pointers(code: str) -> Iterator[tuple[int, str]]:
    """Pointers and references whose type names no address space."""
    named = {name for names in _NAMED_TYPE.findall(code) for name in names if name}
    types = "|".join([_BUILTIN, *map(re.escape, sorted(named))])
    pattern = (
        rf"((?:{_QUALIFIER}\s*)*)(?<!\w)(?:{types})(?!\w)((?:\s*{_QUALIFIER})*)\s*[*&](?![&=])"
    )
    for found in re.finditer(pattern, code):
        if not re.search(_SPACE, found[1] + found[2]):
            yield found.start(), "a pointer or reference needs an address space"


def _recursion(code: str) -> Iterator[tuple[int, str]]:
    """Functions that reach themselves. Overloaded names are left out: one may call another."""
    definitions = [found for found in _FUNCTION.finditer(code) if found[1] not in _KEYWORDS]
    times = Counter(found[1] for found in definitions)
    bodies = {
        found[1]: (found.start(), _block(code, found.end() - 1))
        for found in definitions
        if times[found[1]] == 1
    }
    calls = {
        name: {called for called in re.findall(r"\b(\w+)\s*\(", body) if called in bodies}
        for name, (_, body) in bodies.items()
    }
    for name, (at, _) in bodies.items():
        reached: set[str] = set()
        todo = set(calls[name])
        while todo:
            reached |= todo
            todo = {called for caller in todo for called in calls[caller]} - reached
        if name in reached:
            yield at, f"`{name}` calls itself, and there is no recursion"


def _block(code: str, start: int) -> str:
    """The text from the brace at `start` to the one that closes it."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return code[start : at + 1]
    return code[start:]
