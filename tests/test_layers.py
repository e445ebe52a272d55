"""The floors of ARCHITECTURE.md: each imports only from those below it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What a part may import from the project, besides itself.
ALLOWED = {
    "blocks": set(),
    "models": set(),
    "kernels": set(),
    "cache": {"blocks", "kernels"},
    "weights": {"models"},
    "memory": set(),
    "loader": {"models", "weights", "memory"},
    "engine": {"blocks", "cache", "memory"},
    "llm": {"blocks", "cache", "engine", "loader"},
    "server": {"engine", "loader"},
}


def files_of(part):
    folder = ROOT / part if part in ("models", "kernels") else ROOT / "mlx_paged" / part
    return sorted(folder.glob("**/*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_from_floors_below(part):
    for path in files_of(part):
        modules = [name.split(".") for name in imported_modules(path)]
        used = {name[1] for name in modules if name[0] == "mlx_paged" and len(name) > 1}
        assert used <= ALLOWED[part] | {part}, f"{path.relative_to(ROOT)} imports {used}"
        if part == "blocks":
            assert not any(name[0] in ("mlx", "mlx_lm", "numpy") for name in modules)
