"""The second reading of a kernel: does every pointer stay in its address space?

The same text is read with device, constant, threadgroup and thread as address spaces that do not
convert into each other (include/address_spaces.h), so that an assignment, argument or cast between
them is an error as it is for the Metal compiler. The text depends on the call: MLX passes an input
of fewer than 8 elements as constant.
"""

from __future__ import annotations

import re

from .compiler import Compiler
from .source import Source
from .translation import FILE_NAME, STORAGE, plain_instantiation

_OPTIONS = [
    "-x", "c++", "-std=c++14", "-Wno-everything", "-nostdinc++", "-DMSL_ADDRESS_SPACES",
    "-Xclang", "-cl-single-precision-constant",
]  # fmt: skip
_ELEMENTS = "float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong"
_VECTOR = rf"(?:(?:packed_)?(?:{_ELEMENTS})[234]|(?:metal::)?vec\s*<[^<>;]*>)"
_ALIAS = re.compile(rf"\busing\s+(\w+)\s*=\s*{_VECTOR}\s*;|\btypedef\s+{_VECTOR}\s+(\w+)\s*;")


def check(source: Source, compiler: Compiler) -> None:
    """Raises CompileError where a pointer would change its address space."""
    text = _call_constructors(plain_instantiation(source.code))
    text = STORAGE.sub(r"extern \g<0>", text)  # a local variable can't lie in an address space
    compiler.check_syntax(f'#include <metal_stdlib>\n#line 1 "{FILE_NAME}"\n{text}', _OPTIONS)


def _call_constructors(text: str) -> str:
    """`float4(a, b)` and static_cast<float4>(a) as calls of a function."""
    aliases = [name for names in _ALIAS.findall(text) for name in names if name]
    vector = "|".join([_VECTOR, *aliases])
    return re.sub(
        rf"\b(?:static_cast\s*<\s*({vector})\s*>|({vector}))\s*\(",
        lambda found: f"msl::make<{found[1] or found[2]}>(",
        text,
    )
