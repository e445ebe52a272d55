"""Versions of this package and of what it depends on."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from mlx_paged.doctor.finding import Finding


def software() -> Iterator[Finding]:
    """Each dependency is missing if it is absent or older than this package needs."""
    from packaging.requirements import Requirement

    yield Finding("software", "system", platform.platform(), platform.platform())
    version = platform.python_version()
    yield Finding("software", "python", f"{version} ({sys.executable})", version)
    version = metadata.version("mlx-paged")
    yield Finding("software", "mlx-paged", version, version)
    for requirement in map(Requirement, metadata.requires("mlx-paged") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, needed = requirement.name, f"{requirement.name}{requirement.specifier}"
        found = _installed_version(name)
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            yield Finding("software", name, found, found)
        else:
            text = f"{found or 'not installed'}; needed is {needed}"
            yield Finding("software", name, text, found, "missing", f"pip install '{needed}'")


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
