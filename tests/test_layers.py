"""The one direction of flow: a folder imports only from folders to its left."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "counterfoil"
FLOW = [
    "recipes", "data", "features", "encoders", "kernels", "matchers", "objectives", "foils",
    "models", "plots", "evaluation", "training", "reproduce", "search", "audit", "app", "cli",
]  # fmt: skip


def imported_folders(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "counterfoil" and len(parts) > 1 and parts[1] in FLOW:
                names.add(parts[1])
    return names


@pytest.mark.parametrize("folder", [f for f in FLOW if (SOURCE / f).is_dir()])
def test_a_folder_imports_only_from_its_left(folder) -> None:
    allowed = set(FLOW[: FLOW.index(folder) + 1])
    for path in (SOURCE / folder).rglob("*.py"):
        assert imported_folders(path) <= allowed, path


def test_every_folder_has_its_place_in_the_flow() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders <= set(FLOW)


@pytest.mark.parametrize("folder", [f for f in FLOW[:-1] if (SOURCE / f).is_dir()])
def test_nothing_below_the_command_line_prints_or_reads_the_environment(folder) -> None:
    for path in (SOURCE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv"), f"{path}:{node.lineno}"


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_help_data_and_config_never_import_torch() -> None:
    code = "import counterfoil, counterfoil.cli, counterfoil.data, counterfoil.config"
    assert "torch" not in modules_after(code)


def test_nothing_is_imported_before_it_is_needed() -> None:
    loaded = modules_after("import counterfoil.api, counterfoil.cli")
    assert loaded.isdisjoint(
        {"transformers", "matplotlib", "pyarrow", "tensorboard", "eccv_caption"}
    )
