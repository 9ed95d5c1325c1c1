"""The one order of imports: a folder imports from folders below it, no file in a circle.

``python -m tests.test_layers`` prints how large the house is: files, lines, cycles.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from statistics import median

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "counterfoil"
TESTS = Path(__file__).parent
ORDER = [
    "core", "data", "kernels", "features", "foils", "encoders", "matchers", "objectives", "models",
    "scoring", "plots", "evaluation", "training", "search", "audit", "reproduce", "adapters", "api",
    "app", "cli",
]  # fmt: skip
"""As in CONTRIBUTING.md; the package's own ``__init__`` and ``__main__`` stand above all."""
LABORATORY = "reproduce"
MOST_LINES = 450
READS_ENVIRONMENT = "counterfoil.core.storage.atomic"
"""`default_cache`: one folder for the command line and for Python."""
WHOLE = {"conformance", "hostile", "parity", "same_scores", "options", "first_day", "typos"}
"""Tests of a folder as a whole; all others are named after the file that they test."""


@cache
def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in files()}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, read once for all tests."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported(path: Path) -> set[Path]:
    """Files of the package that a file imports: lazily and for type checkers, too."""
    modules = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                modules.append(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return {MODULES[module] for module in modules if module in MODULES} - {path}


def place(path: Path) -> str:
    """The folder of a file below the package, or the name of a file that stands in no folder."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def cycles() -> list[list[str]]:
    """Files that import each other in a circle, largest groups first."""
    edges = {path: imported(path) for path in files()}
    reach = {path: _reachable(path, edges) for path in edges}
    groups = {
        frozenset(other for other in reach[path] if path in reach[other])
        for path in edges
        if path in reach[path]
    }
    return sorted((sorted(module_of(path) for path in group) for group in groups), key=len)[::-1]


def _reachable(start: Path, edges: dict[Path, set[Path]]) -> set[Path]:
    seen: set[Path] = set()
    ahead = list(edges[start])
    while ahead:
        path = ahead.pop()
        if path not in seen:
            seen.add(path)
            ahead += edges[path]
    return seen


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_only_from_those_below_it(folder) -> None:
    allowed = set(ORDER[: ORDER.index(folder) + 1])
    for path in files():
        if place(path) == folder:
            others = {place(other) for other in imported(path)} - {"__init__"}
            assert others <= allowed, path


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders - {"recipes", "zoo"} <= set(ORDER)  # YAML and weights, no code


def test_the_order_is_the_one_that_contributors_read() -> None:
    page = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = page.partition("```text\n")[2].partition("```")[0]
    assert [line.split()[0] for line in drawing.splitlines()] == ORDER[::-1]


def test_no_file_imports_another_in_a_circle() -> None:
    assert cycles() == []


def test_nothing_but_the_command_line_imports_the_laboratory() -> None:
    for path in files():
        if place(path) not in (LABORATORY, "cli"):
            assert LABORATORY not in {place(other) for other in imported(path)}, path


def test_nothing_imports_the_adapters() -> None:
    for path in files():
        if place(path) != "adapters":
            assert "adapters" not in {place(other) for other in imported(path)}, path


def test_no_file_is_too_long_to_read() -> None:
    long = {module_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files()}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("folder", ORDER[:-1])
def test_nothing_below_the_command_line_prints_or_reads_the_environment(folder) -> None:
    for path in files():
        if place(path) != folder:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and module_of(path) != READS_ENVIRONMENT:
                assert node.attr not in ("environ", "getenv"), f"{path}:{node.lineno}"


def test_a_test_is_named_after_the_file_that_it_tests() -> None:
    for path in sorted(TESTS.rglob("test_*.py")):
        folder = path.parent.relative_to(TESTS)
        if folder.parts[:1] in [(), ("oracle",), ("benchmarks",), ("hostile",), ("faults",)]:
            continue
        assert (SOURCE / folder).is_dir(), f"{path}: there is no such folder of sources"
        stem = path.stem.removeprefix("test_")
        names = {source.stem for source in (SOURCE / folder).glob("*.py")} | {folder.name} | WHOLE
        assert any(stem == name or stem.startswith(f"{name}_") for name in names), path


def test_tests_that_are_named_somewhere_exist() -> None:
    root = TESTS.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *TESTS.glob("*.py")]
    for page in pages:
        for name in re.findall(r"tests/[\w/]+\.py", page.read_text(encoding="utf-8")):
            assert (root / name).is_file(), f"{page}: {name}"


@cache
def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


STARTS = {
    "cli": "import counterfoil, counterfoil.cli, counterfoil.core.config, counterfoil.data, "
    "counterfoil.features",
    "api": "import counterfoil.api",
}


def test_help_data_features_and_config_never_import_torch() -> None:
    assert "torch" not in modules_after(STARTS["cli"])


def test_the_api_imports_nothing_heavy_that_it_may_not_need() -> None:
    loaded = modules_after(STARTS["api"])
    assert loaded.isdisjoint(
        {"transformers", "matplotlib", "pyarrow", "tensorboard", "eccv_caption", "scipy", "spacy"}
    )


def needed_names(extra: bool) -> set[str]:
    """What the package requires by itself, or in any of its extras."""
    lines = requires("counterfoil") or []
    names = [(re.match(r"[\w.-]+", line), "extra ==" in line) for line in lines]
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name, own in names if name and own is extra}


@pytest.mark.parametrize("start", STARTS)
def test_nothing_of_an_extra_is_imported_at_the_start(start: str) -> None:
    """After `pip install counterfoil` FastAPI, for one, is not there."""
    optional = needed_names(extra=True) - needed_names(extra=False)
    assert {"fastapi", "scipy"} <= optional
    owners = packages_distributions()
    loaded = {name.partition(".")[0] for name in modules_after(STARTS[start])}
    of_extras = {
        name
        for name in loaded
        if optional & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners.get(name, [])}
    }
    assert not of_extras


if __name__ == "__main__":
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files()}
    names = Counter(path.name for path in lines if path.name != "__init__.py")
    largest = max(lines, key=lambda path: lines[path])
    print(f"files     {len(lines)}")
    print(f"lines     {sum(lines.values())}")
    print(f"median    {median(lines.values()):.0f}")
    print(f"largest   {lines[largest]} ({largest.relative_to(SOURCE)})")
    print(f"cycles    {len(cycles())}")
    print(f"names of two files or more  {sum(count > 1 for count in names.values())}")
