"""What Metal lacks, or asks for, and a C++ compiler does not notice."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

from .fault import KernelFault
from .source import Source
from .translation import STORAGE

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
_VARIABLE = re.compile(
    r"(?!using|typedef|template|namespace|struct|enum|class|union)(?!.*\bconstant\b)"
    r"(?:[\w:]+(?:\s*<[^;()]*>)?\s+)+\w+\s*(?:\[[^\]]*\]\s*)*(?:=|$)",
    re.DOTALL,
)
_KEYWORDS = {"if", "for", "while", "switch", "return", "do"}


def check(source: Source) -> None:
    """Raises KernelFault for the first thing that Metal would refuse."""
    code = re.sub(r'"[^"\n]*"', lambda found: '"' + " " * (len(found[0]) - 2) + '"', source.code)
    header = code[: len(source.header)]
    for at, message in itertools.chain(
        _missing_features(code),
        _unqualified_pointers(code),
        _recursion(code),
        _misplaced_storage(code, len(header)),
        _program_scope_variables(header),
    ):
        place = source.place(code.count("\n", 0, at) + 1)
        raise KernelFault("not in Metal", source.kernel, f"is refused: {message}", place)


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


def _misplaced_storage(code: str, body_start: int) -> Iterator[tuple[int, str]]:
    for found in STORAGE.finditer(code, 0, body_start):
        yield (
            found.start(),
            "threadgroup storage is declared in the kernel, not in a function of it",
        )
    others = STORAGE.sub(lambda found: re.sub(r"\S", " ", found[0]), code)
    for found in re.finditer(r"\bthreadgroup\s[^;*&(){}=]*[;={]", others):
        yield found.start(), "this declaration of threadgroup storage is not understood here"


def _program_scope_variables(header: str) -> Iterator[tuple[int, str]]:
    """Variables outside functions, which must be `constant`."""
    at = depth = 0
    for found in re.finditer(r"[{};]|\n\s*#[^\n]*", "\n" + header):
        end = found.start() - 1
        statement = header[at:end]
        if depth == 0 and found[0] in ";{" and _VARIABLE.match(statement.strip()):
            start = at + len(statement) - len(statement.lstrip())
            yield start, "a variable outside functions needs `constant`"
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        at = end + len(found[0])


def _block(code: str, start: int) -> str:
    """The text from the brace at `start` to the one that closes it."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return code[start : at + 1]
    return code[start:]
