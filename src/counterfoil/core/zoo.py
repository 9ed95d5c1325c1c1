"""The zoo: pretrained models by name, from folders, the package, or a download.

``zoo/registry.yaml`` lists them. Importing this module does not import torch, so the command line
can list and find models at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError, field_validator

from counterfoil.core.config import MODEL_CONFIG, Section
from counterfoil.core.errors import CheckpointError, nearest
from counterfoil.core.recipes import parse_yaml
from counterfoil.core.storage.reading import MIB, RECIPE_BYTES, digest_of, read_text

FOLDER = Path(__file__).resolve().parents[1] / "zoo"
REGISTRY = FOLDER / "registry.yaml"
CARD = "README.md"
"""Card of a pretrained model, beside its weights."""

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
FILE = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*\.(json|safetensors|txt|md)|SHA256SUMS", re.ASCII)
"""Names of files that a saved model consists of; none of them can hold code or pickles."""


class ZooFile(Section):
    """A file of a pretrained model."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0, le=1 << 34, description="bytes")


class Result(Section):
    """A measured number, and the command that prints it."""

    name: str
    value: float
    command: str


class ZooEntry(Section):
    """A pretrained model as the registry describes it."""

    summary: str = Field(description="what the model is for, in one line")
    trained_on: str
    command: str = Field(description="the command that trained it")
    results: list[Result] = Field(min_length=1)
    license: str = Field(description="SPDX identifier, or 'other'")
    terms: str = Field(description="what the model may be used for")
    extra: str | None = Field(None, description="extra that reading images needs")
    url: str | None = Field(None, description="folder of the files; null: part of the package")
    files: dict[str, ZooFile] = Field(min_length=1)

    @field_validator("files")
    @classmethod
    def _has_files_of_a_model(cls, files: dict[str, ZooFile]) -> dict[str, ZooFile]:
        if odd := [name for name in files if not FILE.fullmatch(name)]:
            raise ValueError(f"not a file of a saved model: {odd[0]!r}")
        if missing := {MODEL_CONFIG, "model.safetensors", "SHA256SUMS", CARD} - files.keys():
            raise ValueError(f"missing: {', '.join(sorted(missing))}")
        return files

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


_ENTRIES: TypeAdapter[dict[str, ZooEntry]] = TypeAdapter(
    dict[Annotated[str, Field(pattern=f"^{NAME.pattern}$")], ZooEntry]
)


def entries(registry: Path = REGISTRY) -> dict[str, ZooEntry]:
    """The pretrained models of a registry, by name."""
    try:
        return _parse(read_text(registry, RECIPE_BYTES))
    except OSError as error:
        raise CheckpointError(
            f"{registry}: cannot be read ({error.strerror}); install the package again"
        ) from None
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{registry}: {where}: {first['msg']}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(f"{registry}: not a registry ({error})") from None


@lru_cache(maxsize=4)
def _parse(text: str) -> dict[str, ZooEntry]:
    return _ENTRIES.validate_python(parse_yaml(text))


def names(pattern: str = "*", registry: Path = REGISTRY) -> list[str]:
    """Names of pretrained models that match a pattern with wildcards."""
    return [name for name in entries(registry) if fnmatchcase(name, pattern)]


def is_pretrained(source: str | Path) -> bool:
    """Whether a text names a pretrained model; a folder of that name comes first."""
    return not os.path.lexists(source) and str(source) in entries()


def is_read_only(folder: Path) -> bool:
    """Whether a folder is part of the package, where no command may write results."""
    return folder.resolve().is_relative_to(FOLDER)


def resolve(source: str | Path, *, registry: Path = REGISTRY) -> Path:
    """The folder of a run, of a saved model, or of a pretrained model given by name.

    A folder of that name comes first. A path is returned as it is, whether or not it exists.
    """
    path = Path(source)
    if os.path.lexists(path) or len(path.parts) != 1:
        return path
    entry = entries(registry).get(str(source))
    if entry is None:
        raise _unknown(str(source), registry)
    folder = registry.parent / str(source)
    check_files(folder, entry)
    return folder


def _unknown(name: str, registry: Path) -> CheckpointError:
    known = names(registry=registry)
    return CheckpointError(
        f"{name}: neither a run nor a saved model, and not the name of a pretrained model"
        f"{nearest(name, known)} (expected a folder made by counterfoil train, or one of: "
        f"{', '.join(known)}; `counterfoil models --pretrained` describes them)"
    )


def check_files(folder: Path, entry: ZooEntry) -> None:
    """Refuse a folder whose files are not those of the registry, by the name of the file."""
    for name, expected in entry.files.items():
        path = folder / name
        try:
            size, digest = path.stat().st_size, digest_of(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if (size, digest) != (expected.size, expected.sha256):
            raise CheckpointError(
                f"{path}: not the file of the registry (SHA-256 {digest[:16]}…, {size} bytes; "
                f"expected {expected.sha256[:16]}…, {expected.size} bytes); install the package "
                "again"
            )


CARD_TEXT = """---
license: {license}
library_name: counterfoil
tags: [image-text-matching]
---
# {name}

{summary}

```python
import counterfoil as cf

model = cf.load("{name}")
model.explain("photo.jpg", "a dog on a beach")
```

- **Trained on:** {trained_on}
- **Trained by:** `{command}`
- **License:** {license}. {terms}
- **Weights:** half precision; computed in single precision once loaded.

| result | value | printed by |
| --- | --- | --- |
{results}
"""


def card(name: str, described: Mapping[str, Any]) -> str:
    """The card of a pretrained model in Markdown, from the fields of its registry entry."""
    rows = [
        f"| {one['name']} | {one['value']:g} | `{one['command']}` |" for one in described["results"]
    ]
    return CARD_TEXT.format(**{**described, "name": name, "results": "\n".join(rows)})


def size_text(size: int) -> str:
    """
    >>> size_text(1_500_000)
    '1.4 MB'
    """
    return f"{size / MIB:.1f} MB"
