"""Opens what the web service serves: an index with its model, an audit, training runs."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from PIL import Image

from counterfoil.app.problems import Problem
from counterfoil.audit.describe import writable
from counterfoil.audit.findings import SIGN_NAMES, Finding
from counterfoil.audit.report import IMAGES_FILE, LINES, SUMMARY, group_by_caption
from counterfoil.core.config import RunConfig, load_config
from counterfoil.core.errors import ConfigError, CounterfoilError, DataError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import Scratch
from counterfoil.core.storage.reading import LINES_BYTES, open_regular, read_lines, read_text
from counterfoil.data.images import as_image, open_image
from counterfoil.data.pairs import Split
from counterfoil.models.correct import can_correct
from counterfoil.models.model import Model
from counterfoil.search import SearchIndex
from counterfoil.search.state import MANIFEST
from counterfoil.training.logs import read_metrics
from counterfoil.training.plots import plots_of, thin
from counterfoil.training.run_data import evaluation_split
from counterfoil.training.run_folder import load_model, run_config

MAX_FINDINGS = 50_000
"""Most findings that are read; the file lists the most suspicious first."""

MAX_SAME_SHOWN = 12
"""Most images with the same caption that one entry names."""

AUDIT_PREFIX = "audit:"
Section = Literal["suspicious", "near-duplicates"]

MAX_POINTS = 300
T = TypeVar("T")

MAX_INDEXED_IMAGES = 2000
"""Most images of a run's data that are indexed at the start; `counterfoil index` has no limit."""

SCENES = {"images": [0, 0, 200]}


@dataclass(frozen=True)
class AuditedImage:
    """An image of the audited data: its id there, its captions, and the location of its pixels.

    ``captions`` is None if the report does not have them.
    """

    id: str
    captions: list[str] | None = None
    pixels: dict[str, Any] | None = None

    def open(self) -> Image.Image:
        return open_image(as_image(self.pixels))


def audited_name(split: str, image: str) -> str:
    """The name that clients use for an image of the audit; it is looked up, never parsed."""
    return f"{AUDIT_PREFIX}{split}:{image}"


class Audit:
    """The findings of a folder, read once; ``images`` has theirs by `audited_name`."""

    def __init__(self, folder: Path) -> None:
        path = folder / LINES
        if not path.is_file():
            raise DataError(
                f"{folder}: has no {LINES}; write one with: counterfoil audit RUN PAIRS "
                f"--out {folder}"
            )
        findings = list(islice(_read(path), MAX_FINDINGS))
        self.notes = _notes(folder / SUMMARY)
        named = (key for finding in findings for key in finding.images)
        self.images = {audited_name(*key): AuditedImage(key[1]) for key in named}
        for name, image in _read_images(folder / IMAGES_FILE):
            if name in self.images:  # only images of findings are served
                self.images[name] = image
        wrong = [[finding] for finding in findings if finding.kind == "mismatch"]
        near = group_by_caption([one for one in findings if one.near_duplicate is not None])
        self._sections: dict[Section, list[list[Finding]]] = {
            "suspicious": wrong,
            "near-duplicates": near,
        }
        self._by_reason: dict[str, list[list[Finding]]] = defaultdict(list)
        for group in wrong:
            for sign in dict.fromkeys(group[0].signs):
                self._by_reason[sign].append(group)
        counts = Counter({sign: len(groups) for sign, groups in self._by_reason.items()})
        self.reasons = [
            {"sign": sign, "name": SIGN_NAMES.get(sign, sign), "count": count}
            for sign, count in counts.most_common()
            if sign != "near-duplicate"
        ]

    def page(
        self, offset: int, limit: int, reason: str | None, section: Section = "suspicious"
    ) -> dict[str, Any]:
        """Entries of a section; with ``reason``, only those that have it."""
        groups = self._sections[section]
        if reason is not None and section == "suspicious":
            groups = self._by_reason.get(reason, [])
        return {
            "section": section,
            "total": len(groups),
            "offset": offset,
            "counts": {name: sum(map(len, groups)) for name, groups in self._sections.items()},
            "reasons": self.reasons,
            "notes": self.notes,
            "findings": [_entry(group) for group in groups[offset : offset + limit]],
        }


def _entry(group: Sequence[Finding]) -> dict[str, Any]:
    """A finding, and the names of the images of all findings with the same caption."""
    first = group[0]
    images = list(dict.fromkeys(audited_name(one.split, one.image) for one in group))
    return {
        **first.as_dict(),
        "image_names": {name: audited_name(split, name) for split, name in first.images},
        "same": len(group),
        "same_images": images[:MAX_SAME_SHOWN],
        "more_images": max(0, len(images) - MAX_SAME_SHOWN),
    }


def _notes(path: Path) -> list[str]:
    """Notes on the audit as a whole; empty if the summary cannot be read."""
    try:
        notes = json.loads(read_text(path))["notes"]
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return []
    return [str(note) for note in notes] if isinstance(notes, list) else []


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-blank lines of a file, with their numbers."""
    try:
        with open_regular(path, LINES_BYTES) as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                if text := line.decode("utf-8", "replace").strip():
                    yield number, text
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _read(path: Path) -> Iterator[Finding]:
    for number, line in _lines(path):
        try:
            finding = Finding.from_json(line)
        except DataError as error:
            raise DataError(f"{path}: line {number}: {error}") from None
        if not _is_finite(finding.as_dict()):
            raise DataError(f"{path}: line {number}: damaged (a number is not finite)")
        yield finding


def _is_finite(tree: object) -> bool:
    """Whether all numbers of a tree are finite, so that JSON can represent them."""
    if isinstance(tree, dict):
        return all(map(_is_finite, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(_is_finite, tree))
    return not isinstance(tree, float) or math.isfinite(tree)


def _read_images(path: Path) -> Iterator[tuple[str, AuditedImage]]:
    """The images of a report; empty if it has no such file."""
    if not path.is_file():
        return
    for number, line in _lines(path):
        try:
            about = json.loads(line)
            split, image, texts, pixels = (about[k] for k in ("split", "id", "captions", "pixels"))
            if not all(isinstance(text, str) for text in (split, image, *texts)):
                raise TypeError("names and captions are text")
            if not isinstance(texts, list) or not isinstance(pixels, (dict, type(None))):
                raise TypeError("captions are a list, pixels an object")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: line {number}: damaged ({error!r})") from None
        captions = [writable(text) for text in texts]
        yield audited_name(split, image), AuditedImage(image, captions, pixels)


class FileCache(Generic[T]):
    """Results of ``read`` per file, until the file changes."""

    def __init__(self, read: Callable[[Path], T]) -> None:
        self._read = read
        self._cached: dict[Path, tuple[tuple[int, ...], T]] = {}

    def get(self, path: Path) -> T:
        stamp = _stamp(path)  # before reading, so that a change meanwhile is noticed next time
        cached = self._cached.get(path)
        if cached is None or cached[0] != stamp:
            cached = (stamp, self._read(path))
            self._cached[path] = cached
        return cached[1]


class Runs:
    """Run folders by name. They are read per request, so that a run can be watched."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._configs, self._results = FileCache(_config), FileCache(_json)
        self._folders: dict[str, Path] = {}
        for folder in folders:
            path = folder.resolve()
            if (path / "config.yaml").is_file() and path not in self._folders.values():
                self._folders[_free_name(path.name, self._folders)] = path

    def __len__(self) -> int:
        return len(self._folders)

    def listed(self) -> list[dict[str, Any]]:
        return [self._summary(name) for name in self._folders]

    def read(self, name: str) -> dict[str, Any]:
        """One run with its plots; the name is looked up, never used as a path."""
        if name not in self._folders:
            raise Problem(404, "no such run; see /api/runs")
        folder = self._folders[name]
        config = self._configs.get(folder / "config.yaml")
        records = read_metrics(folder / "metrics.jsonl")
        split = config.evaluation.split if config is not None else "dev"
        plots = [
            {
                "name": key,
                "title": plot.title,
                "x": plot.x_label,
                "y": plot.y_label,
                "series": [
                    {"name": label, "points": _finite(thin(points, MAX_POINTS))}
                    for label, points in plot.series.items()
                ],
            }
            for key, plot in plots_of(records, split).items()
        ]
        warnings = [r["text"] for r in records if r.get("kind") == "warning"][:20]
        return {
            **self._summary(name),
            "results": self._results.get(folder / "results.json"),
            "config": config.to_yaml() if config is not None else "",
            "plots": plots,
            "warnings": warnings,
        }

    def _summary(self, name: str) -> dict[str, Any]:
        folder = self._folders[name]
        config = self._configs.get(folder / "config.yaml")
        results = self._results.get(folder / "results.json")
        return {
            "name": name,
            "model": config.model.name if config is not None else "unknown",
            "objective": " + ".join(config.objective) if config is not None else "",
            "data": Path(config.data.source).name if config is not None else "",
            "rsum": results.get("rsum") if isinstance(results.get("rsum"), float) else None,
            "finished": bool(results),
        }


def runs_below(folder: Path) -> list[Path]:
    """Run folders in a folder, in the order of their names."""
    return sorted(path.parent for path in folder.glob("*/config.yaml"))


def _free_name(name: str, taken: Iterable[str]) -> str:
    used, number, free = set(taken), 2, name
    while free in used:
        free, number = f"{name}-{number}", number + 1
    return free


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes with the file; empty if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _config(path: Path) -> RunConfig | None:
    try:
        return load_config(path)
    except CounterfoilError:
        return None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no file yet; NaN becomes null, as JSON has no NaN."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


@dataclass
class AwaitedAudit:
    """An audit that another process makes in a folder; ``problem`` says why it failed."""

    folder: Path
    problem: str = ""

    def try_open(self) -> Audit | None:
        """The audit; None if it is not complete yet."""
        return Audit(self.folder) if (self.folder / SUMMARY).is_file() else None


@dataclass(frozen=True)
class Content:
    """What is served; ``close`` deletes a temporary index."""

    index: SearchIndex
    corrector: Model | None = None
    audit: Audit | None = None
    runs: Runs = field(default_factory=lambda: Runs([]))
    close: Callable[[], None] = lambda: None
    awaited_audit: AwaitedAudit | None = None


def open_content(
    folder: Path,
    *,
    index: Path | None = None,
    corrector: Path | None = None,
    audit: Path | None = None,
    runs: Path | None = None,
    cache: Path,
    device: str = "auto",
    progress: Progress,
) -> Content:
    """Open a run or an index, with a corrector, an audit and further runs.

    A run without an ``index`` gets a temporary one of the images of its test split; a model without
    data gets one of scenes.
    """
    findings = Audit(audit) if audit is not None else None
    correcting = _corrector(corrector, device) if corrector is not None else None
    listed = [path for path in (folder, corrector) if path is not None]
    listed += runs_below(runs) if runs is not None else []
    close: Callable[[], None] = lambda: None  # noqa: E731 - only a temporary index is deleted
    if (folder / MANIFEST).is_file():
        if index is not None:
            raise ConfigError(f"{folder} is an index already; give a run, or leave out --index")
        opened = SearchIndex.open(folder, device=device)
    else:
        model = load_model(folder, device)
        if index is not None:
            opened = SearchIndex.open(index, model=model)
        else:
            scratch = Scratch("counterfoil-serve-")
            split = _indexed_split(folder, cache, progress)
            opened = SearchIndex.build(
                scratch.folder / "index", model, split, first_stage="pooled", progress=progress
            )
            close = scratch.close
    if correcting is None and can_correct(opened.model):
        correcting = opened.model
    return Content(opened, correcting, findings, Runs(listed), close)


def _corrector(folder: Path, device: str) -> Model:
    model = load_model(folder, device)
    if not can_correct(model):
        raise ConfigError(
            f"{folder}: this model was not trained to correct; train one with the objective "
            "tags-dc (recipe scenes/tags-dc)"
        )
    if model.fragments_from is None:
        raise ConfigError(
            f"{folder}: this model was trained on precomputed features and cannot read pixels; "
            "train one on images"
        )
    return model


def _indexed_split(run: Path, cache: Path, progress: Progress) -> Split:
    config = run_config(run)
    if config is None:
        return evaluation_split(run, "scenes", None, SCENES, cache, progress)["test"]
    pairs = evaluation_split(run, None, None, {}, cache, progress)
    names = (config.evaluation.test_split, config.evaluation.split)
    split = next((pairs[name] for name in names if name in pairs), next(iter(pairs)))
    if len(split) > MAX_INDEXED_IMAGES:
        progress.say(
            f"serving the first {MAX_INDEXED_IMAGES} of {len(split)} images; use --index for all"
        )
        split = split.select(range(MAX_INDEXED_IMAGES))
    return split
