"""Pinned hashes, a list of what is installed, and a release that is the same twice.

    python .ci/supply_chain.py pins             # writes requirements-ci.txt; needs uv
    python .ci/supply_chain.py sbom sbom.json   # CycloneDX, of the environment that runs it
    python .ci/supply_chain.py release-check    # builds wheel and sdist twice, compares SHA-256

The Makefile has a target for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements-ci.txt"
TOOLS = ("hatchling", "editables", "bandit", "pip-audit")
"""What CI needs besides the extra ``dev``: the build backend, and the checks of this file."""

CPU_TORCH = (
    "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # cp311, Linux, aarch64
)
"""Hashes of CPU builds of torch, which the package index does not list. Another platform's build is
added here by the output of ``pip hash FILE``."""

HEADER = """\
# What CI installs, with the SHA-256 of every file: make pins writes it from pyproject.toml and
# constraints.txt. CUDA libraries are left out: CI runs on CPU builds of torch.
"""


def write_pins() -> None:
    """Resolve the extra ``dev`` within constraints.txt, for all platforms, with hashes."""
    command = [_program("uv"), "pip", "compile", "pyproject.toml", "-", "--extra", "dev"]
    command += ["-c", "constraints.txt", "--generate-hashes", "--universal"]
    command += ["--python-version", "3.10", "--no-header", "--no-annotate", "--quiet"]
    resolved = subprocess.run(  # noqa: S603 - a program of this environment
        command, cwd=ROOT, input="\n".join(TOOLS), capture_output=True, text=True, check=False
    )
    if resolved.returncode:
        sys.exit(f"uv could not resolve the requirements:\n{resolved.stderr}")
    blocks = re.split(r"\n(?=\S)", resolved.stdout.strip())
    kept = [block for block in blocks if not re.match(r"(nvidia|cuda)-", block)]
    lines = [_cpu_build(block) if block.startswith("torch==") else block for block in kept]
    PINS.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{PINS.name}: {len(lines)} requirements, {sum(b.count('--hash') for b in lines)} hashes")


def _cpu_build(block: str) -> str:
    """The pin of torch for its CPU build: without "+cpu", pip prefers the file of the index."""
    version = re.match(r"torch==([\w.]+)", block)
    assert version is not None  # noqa: S101 - called for torch alone
    hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in CPU_TORCH)
    return f"torch=={version[1]}+cpu{hashes}"


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed: pip install {name}")
    return found


def sbom() -> dict[str, object]:
    """A CycloneDX 1.5 document of all packages of this environment, in the order of their names.

    It has no time and no random number, so that the same environment gives the same document.
    """
    found = {_name(one): one for one in distributions()}
    components = [_component(found[name]) for name in sorted(found) if name != "counterfoil"]
    text = json.dumps(components, sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()
    serial = f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-a{digest[17:20]}-{digest[20:32]}"
    document: dict[str, object] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "components": components,
        "dependencies": [
            {"ref": _purl(one), "dependsOn": sorted(_needed(one, found))}
            for _, one in sorted(found.items())
        ],
    }
    if "counterfoil" in found:
        document["metadata"] = {
            "component": {**_component(found["counterfoil"]), "type": "application"}
        }
    return document


def _name(one: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower()


def _purl(one: Distribution) -> str:
    return f"pkg:pypi/{_name(one)}@{quote(one.version, safe='')}"


def _component(one: Distribution) -> dict[str, object]:
    component: dict[str, object] = {
        "type": "library",
        "bom-ref": _purl(one),
        "name": _name(one),
        "version": one.version,
        "purl": _purl(one),
    }
    license_ = one.metadata.get("License-Expression")
    if license_:
        component["licenses"] = [{"expression": license_}]
    elif name := (one.metadata.get("License") or "").strip().split("\n")[0][:100]:
        component["licenses"] = [{"license": {"name": name}}]
    return component


def _needed(one: Distribution, found: dict[str, Distribution]) -> set[str]:
    """References of installed packages that a package requires."""
    names = (re.match(r"[\w.-]+", line) for line in one.requires or () if "extra ==" not in line)
    plain = (re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name)
    return {_purl(found[name]) for name in plain if name in found}


def release_check() -> None:
    """Build the release twice, in different folders, and compare the files byte by byte."""
    digests = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in (1, 2):
            source = Path(temporary) / f"copy-{number}" / ("deeper" * number)
            _checkout(source)
            digests.append(_build(source, Path(temporary) / f"built-{number}"))
    for name, digest in digests[0].items():
        print(f"{digest}  {name}")
    if digests[0] != digests[1]:
        sys.exit(f"the second build differs: {digests[1]}")
    print("the second build is the same")


def _checkout(folder: Path) -> None:
    """The files that git knows, with the time of the copy: a build must not depend on it."""
    git = _program("git")
    listed = subprocess.run(  # noqa: S603
        [git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def _build(source: Path, out: Path) -> dict[str, str]:
    """SHA-256 of the wheel and the sdist of a source tree, by name."""
    stamp = subprocess.run(  # noqa: S603
        [_program("git"), "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, check=True
    )
    environment = {**os.environ, "SOURCE_DATE_EPOCH": stamp.stdout.decode().strip()}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    built = subprocess.run(  # noqa: S603
        command, cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    if built.returncode:
        sys.exit(f"the build failed (is hatchling installed?):\n{built.stderr}")
    files = sorted(path for path in out.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    task, *rest = sys.argv[1:] or ["help"]
    if task == "pins":
        write_pins()
    elif task == "sbom" and len(rest) == 1:
        document = sbom()
        Path(rest[0]).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"{rest[0]}: {len(document['components'])} components")  # type: ignore[arg-type]
    elif task == "release-check":
        release_check()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
