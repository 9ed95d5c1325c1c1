"""The zoo: pretrained models by name, from folders, the package, or a download.

``zoo/registry.yaml`` lists them. Importing this module does not import torch, so the command line
can list and find models at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError, field_validator

from counterfoil.core.config import MODEL_CONFIG, Section
from counterfoil.core.errors import CheckpointError, nearest
from counterfoil.core.hub import HUB_ADDRESS, fetch_from_hub
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.recipes import parse_yaml
from counterfoil.core.storage.atomic import default_cache
from counterfoil.core.storage.checksums import MODEL_FILE
from counterfoil.core.storage.download import DownloadError, fetch
from counterfoil.core.storage.locks import locked_in_turn
from counterfoil.core.storage.reading import MIB, RECIPE_BYTES, digest_of, read_text

FOLDER = Path(__file__).resolve().parents[1] / "zoo"
REGISTRY = FOLDER / "registry.yaml"
CARD = "README.md"
"""Card of a pretrained model, beside its weights."""

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


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
    license_name: str = Field(
        "research-only",
        pattern="^[a-z0-9]+([.-][a-z0-9]+)*$",
        description="short name of the terms on the hub, if the license is 'other'",
    )
    terms: str = Field(description="what the model may be used for")
    extra: str | None = Field(None, description="extra that reading images needs")
    url: str | None = Field(None, description="folder of the files; null: part of the package")
    files: dict[str, ZooFile] = Field(min_length=1)

    @field_validator("files")
    @classmethod
    def _has_files_of_a_model(cls, files: dict[str, ZooFile]) -> dict[str, ZooFile]:
        if odd := [name for name in files if not MODEL_FILE.fullmatch(name)]:
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
    """Names of pretrained models that match a pattern with wildcards, sorted."""
    return sorted(name for name in entries(registry) if fnmatchcase(name, pattern))


def is_pretrained(source: str | Path) -> bool:
    """Whether a text names a pretrained model; a folder of that name comes first."""
    if os.path.lexists(source):
        return False
    return str(source) in entries() or bool(HUB_ADDRESS.fullmatch(str(source)))


def resolve(
    source: str | Path,
    *,
    cache: str | Path | None = None,
    registry: Path = REGISTRY,
    progress: Progress | None = None,
) -> Path:
    """The folder of a run, of a saved model, or of a pretrained model given by name.

    A folder comes first, then a name of the registry, then ``hf://owner/name``. What is not part of
    the package is downloaded once into ``cache`` (None: `default_cache`). Other paths are returned
    as they are, whether or not they exist.
    """
    path = Path(source)
    if os.path.lexists(path):
        return path
    cache = Path(cache or default_cache())
    if HUB_ADDRESS.fullmatch(str(source)):
        return fetch_from_hub(str(source), cache / "pretrained", progress or Silent())
    if len(path.parts) != 1:
        return path
    entry = entries(registry).get(str(source))
    if entry is None:
        raise _unknown(str(source), registry)
    if entry.url is None:
        folder = registry.parent / str(source)
        if missing := _missing(folder, entry):
            raise CheckpointError(f"{folder / missing[0]}: no such file; install the package again")
        return folder
    return _download(str(source), entry, cache, progress or Silent())


Location = Literal["shipped", "cached", "to download"]


def location(name: str, *, cache: str | Path | None = None, registry: Path = REGISTRY) -> Location:
    """Where the files of a registered model are; their content is not checked."""
    entry = entries(registry)[name]
    if entry.url is None:
        return "shipped"
    folder = _cached(name, entry, Path(cache or default_cache()))
    whole = all((folder / file).is_file() for file in entry.files)
    return "cached" if whole else "to download"


def _cached(name: str, entry: ZooEntry, cache: Path) -> Path:
    """The folder of a download: another version of a model gets another one."""
    sums = "".join(f"{file} {one.sha256}\n" for file, one in sorted(entry.files.items()))
    return cache / "pretrained" / f"{name}-{hashlib.sha256(sums.encode()).hexdigest()[:12]}"


def _download(name: str, entry: ZooEntry, cache: Path, progress: Progress) -> Path:
    """The folder of a model in the cache, with its missing files downloaded.

    Every file appears complete, and all are verified at each use; so no reader needs the lock.
    """
    folder = _cached(name, entry, cache)
    if not _missing(folder, entry):
        return folder
    parts = folder.with_name(f".{folder.name}.part")  # a saved model's folder holds no others
    with locked_in_turn(folder.with_name(f".{folder.name}.lock"), f"downloading {name}", progress):
        for file in _missing(folder, entry):
            parts.mkdir(parents=True, exist_ok=True)
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            part, one = parts / f"{file.replace('/', '--')}.part", entry.files[file]
            address = f"{str(entry.url).rstrip('/')}/{file}"
            try:
                fetch(address, folder / file, one.size, one.sha256, part, progress)
            except DownloadError as error:
                raise DownloadError(
                    f"{name}: could not be downloaded ({error}). Run it again with a network "
                    "connection: the download continues. Or fetch these files by hand from "
                    f"{entry.url} into {folder}: {', '.join(_missing(folder, entry))}"
                ) from None
        shutil.rmtree(parts, ignore_errors=True)
    return folder


def _unknown(name: str, registry: Path) -> CheckpointError:
    known = names(registry=registry)
    return CheckpointError(
        f"{name}: neither a run nor a saved model, and not the name of a pretrained model"
        f"{nearest(name, known)} (expected a folder made by counterfoil train, or one of: "
        f"{', '.join(known)}; `counterfoil models --pretrained` describes them)"
    )


def _missing(folder: Path, entry: ZooEntry) -> list[str]:
    """Files of a model that a folder lacks; a file that differs is refused by its name.

    In the cache, such a file is deleted.
    """
    missing = []
    for name, expected in entry.files.items():
        path = folder / name
        try:
            digest = digest_of(path)
        except FileNotFoundError:
            missing.append(name)
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if digest != expected.sha256:
            advice = "install the package again"
            if entry.url is not None:
                path.unlink()
                advice = "it was deleted; run it again to download it anew"
            raise CheckpointError(
                f"{path}: not the file of the registry (its SHA-256 is {digest[:16]}…, expected "
                f"{expected.sha256[:16]}…); {advice}"
            )
    return missing


CARD_TEXT = """---
{license_tags}
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
    tags = f"license: {described['license'].lower()}"  # the hub refuses upper case
    if described["license"].lower() == "other":
        default = ZooEntry.model_fields["license_name"].default
        tags += f"\nlicense_name: {described.get('license_name', default)}"
    made = {"name": name, "results": "\n".join(rows), "license_tags": tags}
    return CARD_TEXT.format(**{**described, **made})


def size_text(size: int) -> str:
    """
    >>> size_text(1_500_000)
    '1.4 MB'
    """
    return f"{size / MIB:.1f} MB"
