"""The pinned requirements are those of the package, and the list of components is complete."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==([^ ;]+)", re.M)


@pytest.fixture(scope="module")
def supply_chain():
    spec = importlib.util.spec_from_file_location("supply_chain", ROOT / ".ci" / "supply_chain.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pins() -> dict[str, set[str]]:
    """Pinned versions by name; a package may have one for each version of Python."""
    found: dict[str, set[str]] = {}
    for name, pinned in PIN.findall((ROOT / "requirements-ci.txt").read_text()):
        found.setdefault(name, set()).add(pinned.split("+")[0])  # without the build, as "+cpu"
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_pin_has_hashes_and_no_cuda_library_is_among_them(pins) -> None:
    blocks = re.split(r"\n(?=[a-z0-9])", (ROOT / "requirements-ci.txt").read_text())
    without = [block for block in blocks if PIN.match(block) and "--hash=sha256:" not in block]
    assert not without
    assert not [name for name in pins if name.startswith(("nvidia-", "cuda-"))]


def test_every_constraint_is_pinned_to_its_version(pins) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    stated = [line.split(";")[0].strip().split("==") for line in lines if "==" in line]
    wrong = [
        f"{name}=={wanted}"
        for name, wanted in stated
        if normal(name) in pins and wanted not in pins[normal(name)]
    ]
    assert not wrong, "run `make pins`"


def test_every_requirement_of_the_package_is_pinned(pins, supply_chain) -> None:
    project = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0]
    project = project.split("[project]")[1]
    names = {normal(name) for name in re.findall(r'"([A-Za-z][\w.-]*)(?:\[[^]]*\])?[<>=]', project)}
    names |= set(supply_chain.TOOLS)
    not_in_ci = {"open-clip-torch"}  # see the extra dev
    assert {"torch", "hatchling", "fastapi", "pytest"} <= names
    assert not names - set(pins) - not_in_ci, "run `make pins`"


@pytest.mark.slow
def test_the_list_of_components_has_each_package_once_with_what_it_requires(supply_chain) -> None:
    document = supply_chain.sbom()
    listed = [one["name"] for one in document["components"]]
    assert len(listed) == len(set(listed))
    numpy = next(one for one in document["components"] if one["name"] == "numpy")
    assert numpy["purl"] == f"pkg:pypi/numpy@{version('numpy')}"
    needs = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    assert requires("pydantic")
    ref = f"pkg:pypi/pydantic@{version('pydantic')}"
    assert any(one.startswith("pkg:pypi/pydantic-core@") for one in needs[ref])


@pytest.mark.slow
def test_the_list_of_components_is_the_same_twice(supply_chain) -> None:
    assert supply_chain.sbom() == supply_chain.sbom()


@pytest.mark.slow
def test_a_release_is_the_same_twice(supply_chain, capsys) -> None:
    pytest.importorskip("hatchling")
    supply_chain.release_check()
    assert "the second build is the same" in capsys.readouterr().out
