"""Metal's text made into a C++ translation unit, line by line the same."""

from __future__ import annotations

import re

from .source import Parameter, Source

# What the compiler calls the kernel's text in messages and in the line table.
FILE_NAME = "kernel.metal"

# `threadgroup float a[4], b;`: storage, not a pointer to it.
_TYPE = r"[A-Za-z_][\w:]*(?:\s*<[^;(){}]*?>)?"
_DECLARATOR = r"[A-Za-z_]\w*\s*(?:\[[^;\]]*\]\s*)*"
STORAGE = re.compile(
    rf"\bthreadgroup\s+(?P<type>{_TYPE})\s+(?P<names>{_DECLARATOR}(?:,\s*{_DECLARATOR})*);"
)
_NAME = re.compile(r"(\w+)\s*(.*)", re.DOTALL)
_INSTANTIATION = re.compile(r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\]", re.MULTILINE)


def to_cpp(source: Source) -> str:
    """The translation unit: Metal's names, the kernel, and an entry that the runtime calls."""
    text = STORAGE.sub(_Storage(), plain_instantiation(source.code))
    return f'#include <metal_stdlib>\n#line 1 "{FILE_NAME}"\n{text}\n{_entry(source)}'


def plain_instantiation(text: str) -> str:
    """C++ takes no attributes on an explicit instantiation."""
    return _INSTANTIATION.sub("template", text)


class _Storage:
    """Replaces a declaration of threadgroup storage by references to storage of the runtime's."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, declaration: re.Match[str]) -> str:
        names = re.findall(_DECLARATOR, declaration["names"])
        newlines = "\n" * declaration[0].count("\n")
        return " ".join(self._reference(declaration["type"], name) for name in names) + newlines

    def _reference(self, element: str, declarator: str) -> str:
        found = _NAME.fullmatch(" ".join(declarator.split()))
        assert found, declarator
        name, extents = found.groups()
        number = self.count
        self.count += 1
        return (
            f"typedef {element} msl_type{number} {extents}; msl_type{number}& {name} = "
            f"*(msl_type{number}*)msl::msl_threadgroup_variable("
            f'{number}, "{name}", sizeof(msl_type{number}));'
        )


def _entry(source: Source) -> str:
    arguments = ", ".join(_argument(parameter) for parameter in source.parameters)
    return (
        'extern "C" __attribute__((visibility("default"))) MSL_UNCHECKED\n'
        "void msl_entry(void* const* buffers, const msl::Attributes* attributes) {\n"
        f"  {source.instance}({arguments});\n"
        "}\n"
    )


def _argument(parameter: Parameter) -> str:
    if not parameter.is_buffer:
        return f"attributes->{parameter.attribute}"
    pointer = f"buffers[{re.sub(r'[^0-9]', '', parameter.attribute)}]"
    if parameter.type.endswith("&"):
        return f"*({parameter.type[:-1]}*){pointer}"
    return f"({parameter.type}){pointer}"
