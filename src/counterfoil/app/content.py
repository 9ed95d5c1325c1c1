"""Opens what the web service serves: models, an index, an audit, training runs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from counterfoil.app.review import AuditReview, State, described
from counterfoil.app.runs import Runs, free_name
from counterfoil.audit.decisions import Review, key_of
from counterfoil.audit.describe import writable
from counterfoil.audit.findings import (
    SIGN_NAMES,
    Finding,
    diverse_first,
    numbered_lines,
    read_findings,
)
from counterfoil.audit.report import IMAGES_FILE, SUMMARY, group_by_caption
from counterfoil.core import zoo
from counterfoil.core.errors import ConfigError, DataError, MissingExtraError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import Scratch
from counterfoil.core.storage.reading import read_text
from counterfoil.data.images import as_image, open_image
from counterfoil.data.pairs import Split
from counterfoil.models.correct import can_correct
from counterfoil.models.model import Model
from counterfoil.search import SearchIndex
from counterfoil.search.state import MANIFEST
from counterfoil.training.run_data import data_for_run
from counterfoil.training.run_folder import load_model, run_config

MAX_FINDINGS = 50_000
"""Most findings that are read; the file lists the most suspicious first."""

MAX_SAME_SHOWN = 12
"""Most images with the same caption that one entry names."""

AUDIT_PREFIX = "audit:"
Section = Literal["suspicious", "near-duplicates"]

MAX_INDEXED_IMAGES = 2000
"""Most images of a run's data that are indexed at the start; `counterfoil index` has no limit."""

SCENES = {"images": [0, 0, 200]}

FIRST_MODELS = ("photos-naaf", "scenes-naaf")
"""Pretrained models that explain unless another is chosen: the first one at hand."""


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

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        findings = read_findings(folder, MAX_FINDINGS)
        self.review = AuditReview(folder, findings, cache)
        summary = _summary(folder / SUMMARY)
        run = summary.get("run")
        self.notes = _notes(summary)
        self.model = writable(Path(run).name) if isinstance(run, str) else ""
        named = (key for finding in findings for key in finding.images)
        self.images = {audited_name(*key): AuditedImage(key[1]) for key in named}
        for name, image in _read_images(folder / IMAGES_FILE):
            if name in self.images:  # only images of findings are served
                self.images[name] = image
        listed = [finding for finding in findings if finding.kind == "mismatch"]
        wrong = [[finding] for finding in diverse_first(listed)]
        near = group_by_caption([one for one in findings if one.near_duplicate is not None])
        self._sections: dict[Section, list[list[Finding]]] = {
            "suspicious": wrong,
            "near-duplicates": near,
        }
        self._by_reason: dict[str, list[list[Finding]]] = defaultdict(list)
        for sign in SIGN_NAMES:
            having = diverse_first([one for one in listed if sign in one.signs])
            self._by_reason[sign] = [[finding] for finding in having]
        counts = Counter({sign: len(each) for sign, each in self._by_reason.items() if each})
        self.reasons = [
            {"sign": sign, "name": SIGN_NAMES.get(sign, sign), "count": count}
            for sign, count in counts.most_common()
            if sign != "near-duplicate"
        ]

    def page(
        self,
        offset: int,
        limit: int,
        reason: str | None,
        section: Section = "suspicious",
        state: State = "all",
        after: str | None = None,
    ) -> dict[str, Any]:
        """Entries of a section: with ``reason`` those that have it, with ``state`` open ones.

        ``after`` is the key of the last entry that the client has. Unlike an offset, it stays
        right while findings are decided. Near-duplicates are not errors, so they have no state.
        """
        groups, review = self._sections[section], self.review.current()
        rest = groups
        if section == "suspicious":
            groups = self._by_reason.get(reason, []) if reason is not None else groups
            keys = [key_of(group[0]).digest for group in groups] if after is not None else []
            rest = groups[keys.index(after) + 1 :] if after in keys else groups
            if state != "all":
                groups, rest = (
                    [one for one in each if review.is_decided(one[0]) == (state == "decided")]
                    for each in (groups, rest)
                )
        return {
            "section": section,
            "state": state,
            "total": len(groups),
            "left": max(0, len(rest) - offset - limit),
            "offset": offset,
            "review": review.counts(),
            "counts": {name: sum(map(len, groups)) for name, groups in self._sections.items()},
            "reasons": self.reasons,
            "notes": self.notes,
            "model": self.model,
            "findings": [_entry(group, review) for group in rest[offset : offset + limit]],
        }


def _entry(group: Sequence[Finding], review: Review) -> dict[str, Any]:
    """A finding, and the names of the images of all findings with the same caption."""
    first = group[0]
    images = list(dict.fromkeys(audited_name(one.split, one.image) for one in group))
    return {
        **first.as_dict(),
        "key": key_of(first).digest,
        **described(review.of_finding(first)),
        "image_names": {name: audited_name(split, name) for split, name in first.images},
        "same": len(group),
        "same_images": images[:MAX_SAME_SHOWN],
        "more_images": max(0, len(images) - MAX_SAME_SHOWN),
    }


def _summary(path: Path) -> dict[str, Any]:
    """Facts on the audit as a whole; empty if the summary cannot be read."""
    try:
        summary = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError, DataError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _notes(summary: Mapping[str, Any]) -> list[str]:
    """Notes on the audit as a whole, then those on each split with its name."""

    def listed(facts: Mapping[str, Any], key: str) -> list[Any]:
        value = facts.get(key)
        return value if isinstance(value, list) else []

    notes = [str(note) for note in listed(summary, "notes")]
    for split in listed(summary, "splits"):
        if isinstance(split, dict):
            notes += [f"{split.get('split')}: {note}" for note in listed(split, "notes")]
    return [writable(note) for note in notes]


def _read_images(path: Path) -> Iterator[tuple[str, AuditedImage]]:
    """The images of a report; empty if it has no such file."""
    if not path.is_file():
        return
    for number, line in numbered_lines(path):
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


@dataclass(frozen=True)
class ServedModel:
    """A model under the name that requests use, with the model that corrects for it."""

    name: str
    model: Model
    corrector: Model | None = None
    summary: str = ""


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
    """What is served; ``close`` deletes a temporary index.

    The first of ``models`` explains, unless a request names another. ``missing`` has one line for
    each model that could be served if something were installed.
    """

    models: tuple[ServedModel, ...]
    index: SearchIndex | None = None
    audit: Audit | None = None
    runs: Runs = field(default_factory=lambda: Runs([]))
    missing: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None
    awaited_audit: AwaitedAudit | None = None


def open_content(
    folder: Path | None,
    *,
    explainer: Path | None = None,
    index: Path | None = None,
    corrector: Path | None = None,
    audit: Path | None = None,
    runs: Path | None = None,
    cache: Path,
    device: str = "auto",
    progress: Progress,
) -> Content:
    """Open a run or an index, with a second model for words, a corrector, an audit and more runs.

    Without a folder, the pretrained models are served, and there is no library. A run without an
    ``index`` gets a temporary one of the images of its test split; a model of segments without data
    gets one of scenes, and other models without data get none.
    """
    findings = Audit(audit, cache) if audit is not None else None
    correcting = _corrector(corrector, device) if corrector is not None else None
    given = [path for path in (folder, explainer, corrector) if path is not None]
    if folder is not None:
        content = _open_library(folder, index, cache, device, progress)
    elif index is not None:
        raise ConfigError(f"--index {index} without RUN; to serve it: counterfoil serve {index}")
    else:
        content = open_zoo(device, cache=cache)
    if explainer is not None:
        own = ServedModel(explainer.name, load_model(explainer, device))
        content = replace(content, models=(own, *content.models))
    return replace(
        content,
        models=_named(content.models, correcting),
        audit=findings,
        runs=Runs(given, below=runs),
    )


def _open_library(
    folder: Path, index: Path | None, cache: Path, device: str, progress: Progress
) -> Content:
    """A model with the index that is searched with it, if there is one."""
    if (folder / MANIFEST).is_file():
        if index is not None:
            raise ConfigError(f"{folder} is an index already; give a run, or leave out --index")
        opened = SearchIndex.open(folder, device=device)
        return Content((ServedModel(opened.model.spec.name, opened.model),), opened)
    model = load_model(folder, device)
    served = (ServedModel(folder.name, model),)
    if index is not None:
        return Content(served, SearchIndex.open(index, model=model))
    if run_config(folder) is None and model.fragments_from not in (None, "segments"):
        return Content(served)
    scratch = Scratch("counterfoil-serve-")
    split = _indexed_split(folder, cache, progress)
    built = SearchIndex.build(
        scratch.folder / "index", model, split, first_stage="pooled", progress=progress
    )
    return Content(served, built, close=scratch.close)


def open_zoo(device: str, registry: Path = zoo.REGISTRY, cache: Path | None = None) -> Content:
    """The pretrained models that need no download; those that read the same fragments correct."""
    models: list[ServedModel] = []
    correctors: dict[str, Model] = {}
    missing: list[str] = []
    for name, entry in zoo.entries(registry).items():
        if zoo.location(name, cache=cache, registry=registry) == "to download":
            missing.append(f"{name} is not downloaded yet: counterfoil serve {name}")
            continue
        try:
            model = load_model(zoo.resolve(name, cache=cache, registry=registry), device)
            reads = model.reader.extractor.fingerprint()
        except MissingExtraError as error:
            missing.append(f"{name} is not served: {error}")
            continue
        if can_correct(model):
            correctors[reads] = model
        else:
            models.append(ServedModel(name, model, summary=entry.summary))
    if not models:
        raise ConfigError("\n".join(["no pretrained model can be served", *missing]))
    models.sort(key=lambda one: (*(one.name != name for name in FIRST_MODELS), one.name))
    served = [
        replace(one, corrector=correctors.get(one.model.reader.extractor.fingerprint()))
        for one in models
    ]
    return Content(tuple(served), missing=tuple(missing))


def _named(models: Sequence[ServedModel], corrector: Model | None) -> tuple[ServedModel, ...]:
    """The models under unique names, each with a corrector: the given one, its own, or itself."""
    named: dict[str, ServedModel] = {}
    for one in models:
        name = free_name(one.name, named)
        own = one.model if can_correct(one.model) else None
        named[name] = replace(one, name=name, corrector=corrector or one.corrector or own)
    return tuple(named.values())


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
        return data_for_run(run, "scenes", None, SCENES, cache, progress)["test"]
    pairs = data_for_run(run, None, None, {}, cache, progress)
    names = (config.evaluation.test_split, config.evaluation.split)
    split = next((pairs[name] for name in names if name in pairs), next(iter(pairs)))
    if len(split) > MAX_INDEXED_IMAGES:
        progress.say(
            f"serving the first {MAX_INDEXED_IMAGES} of {len(split)} images; use --index for all"
        )
        split = split.select(range(MAX_INDEXED_IMAGES))
    return split
