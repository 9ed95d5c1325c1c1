"""`counterfoil demo PHOTOS`: search, explain and audit a folder of one's own photos."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from counterfoil.audit import audit_split
from counterfoil.audit import write_report as write_audit
from counterfoil.cli.output import print_json, print_line
from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.locks import locked_folder
from counterfoil.core.zoo import resolve
from counterfoil.data.formats import sources
from counterfoil.data.images import FileImage
from counterfoil.data.load import load_pairs
from counterfoil.data.pairs import Pairs, Problem, Split
from counterfoil.features import with_fragments
from counterfoil.features.build import is_photo, read_photos
from counterfoil.models import Model
from counterfoil.search import SearchIndex
from counterfoil.training.run_folder import load_model

SEARCHER, EXPLAINER = "photos-vse", "photos-naaf"
SPLIT = "photos"

MAX_AUDITED = 400
"""Most photos whose captions are audited; the time grows with the square of their number."""

MAX_NAMED = 5
"""Problems that are named; the others are counted."""

MAX_REASON = 300
"""Letters of the reason why a file is not used."""

ADVICE = "wait for it, or choose another --out"


@dataclass(frozen=True)
class Library:
    """The photos of a folder; ``captions`` is the file that their captions are from.

    ``skipped`` counts files that are neither photos nor captions, by suffix.
    """

    pairs: Pairs
    captions: Path | None
    skipped: dict[str, int]

    @property
    def split(self) -> Split:
        return self.pairs.splits[SPLIT]

    @property
    def unreadable(self) -> list[Problem]:
        return [one for one in self.pairs.problems if one.kind == "unreadable-image"]


def demo_photos(
    folder: Path,
    out: Path,
    cache: Path,
    bars: Progress,
    port: int | None,
    as_json: bool,
    *,
    searcher: str = SEARCHER,
    explainer: str = EXPLAINER,
) -> None:
    """Prepare a folder of photos, then serve it on ``port``, or print the command that does."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; name a folder of photos")
    searching, explaining = (
        load_model(resolve(name, cache=cache)).eval() for name in (searcher, explainer)
    )
    for model in (searching, explaining):
        model.reader.extractor.fingerprint()  # raises now if its weights are not installed
    library = read_library(folder, bars)
    with locked_folder(out, "preparing photos there", ADVICE):
        readable = _with_features(library, searching, cache, bars)
        SearchIndex.build(
            out / "index", searching, readable.split, overwrite=True, progress=bars
        ).close()
        audited = _with_features(library, explaining, cache, bars)
        audit = _audit(explaining, explainer, audited, out / "audit", bars)
    options = ["--explainer", explainer, *(["--audit", str(audit)] if audit else [])]
    command = shlex.join(["counterfoil", "serve", str(out / "index"), *options])
    if as_json:
        print_json({**_summary(readable), "index": str(out / "index"), "serve": command})
        return
    _show(readable, folder)
    if port is None:
        print_line(f"Open the web page: {command}")
        return
    from counterfoil.cli.serve import serve

    serve(
        out / "index",
        explainer=resolve(explainer, cache=cache),
        audit=audit,
        port=port,
        cache=cache,
    )


def read_library(folder: Path, bars: Progress) -> Library:
    """All photos in a folder and below it, with the captions that a file beside them has."""
    photos = read_photos(folder, SPLIT)
    texts, captions = _read_captions(folder, bars)
    split = photos.splits[SPLIT]
    known = [
        texts.get(_real(ref.path), []) for ref in split.pixels or () if isinstance(ref, FileImage)
    ]
    photos = replace(photos, splits={SPLIT: replace(split, captions=known)})
    return Library(photos, captions, _skipped(folder, captions))


def _read_captions(folder: Path, bars: Progress) -> tuple[dict[str, list[str]], Path | None]:
    """Captions by the real path of their photo, and their file or folder.

    If none can be used, the reasons are reported.
    """
    reasons: dict[Path, str] = {}
    for path in _caption_sources(folder):
        try:
            pairs = load_pairs(path)
        except DataError as error:
            reasons[path] = " ".join(str(error).split())[:MAX_REASON]
            continue
        texts: dict[str, list[str]] = {}
        for split in pairs:
            for ref, captions in zip(split.pixels or (), split.captions, strict=False):
                if isinstance(ref, FileImage):
                    texts.setdefault(_real(ref.path), []).extend(captions)
        if any(texts.values()):
            return texts, path
        reasons[path] = "it has no captions of these photos"
    if len(reasons) > 1:
        reasons.pop(folder, None)  # which failed for the same reason as the files in it
    for path, reason in reasons.items():
        bars.say(f"warning: {path}: not used as captions: {reason}")
    return {}, None


def _caption_sources(folder: Path) -> Iterable[Path]:
    """The folder, if it has the layout of a data set; then files in it that are one themselves."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not is_photo(path.name))
    for path in (folder, *files):
        if any(sources[name].matches(path) for name in sources):
            yield path


def _skipped(folder: Path, captions: Path | None) -> dict[str, int]:
    """Numbers of files that are not photos, by suffix; hidden files do not count."""
    names = (
        name
        for parent, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and not is_photo(name) and Path(parent) / name != captions
    )
    return dict(Counter(Path(name).suffix.lower() or "no suffix" for name in names).most_common())


def _real(path: Path) -> str:
    return os.path.realpath(path)


def _with_features(library: Library, model: Model, cache: Path, bars: Progress) -> Library:
    features = (model.fragments_from or "segments", model.fragments_options)
    return replace(library, pairs=with_fragments(library.pairs, cache, *features, bars))


def _audit(model: Model, name: str, library: Library, out: Path, bars: Progress) -> Path | None:
    """Audit the captions of the first photos that have some; None if fewer than two have."""
    split = library.split
    captioned = [row for row, texts in enumerate(split.captions) if any(map(str.strip, texts))]
    if len(captioned) < 2:
        return None
    chosen = split.select(captioned[:MAX_AUDITED])
    notes = []
    if len(captioned) > len(chosen):
        notes.append(
            f"The captions of {len(chosen)} of {len(captioned)} photos were audited. For all: "
            f"counterfoil audit {name} {library.captions} --out {out}"
        )
    audit = audit_split(model, chosen, progress=bars)
    about = {"run": name, "model": model.spec.name, "data": library.pairs.name}
    with locked_folder(out, "writing an audit there", ADVICE):
        title = f"{library.pairs.name}, read by {name}"
        write_audit(out, title, [audit], about, notes=notes)
    for note in notes:
        bars.say(note)
    return out


def _summary(library: Library) -> dict[str, Any]:
    split = library.split
    return {
        "photos": len(split),
        "captions": len(split.texts),
        "captions_from": str(library.captions) if library.captions else None,
        "unreadable": [str(one) for one in library.unreadable],
        "skipped": library.skipped,
    }


def _show(library: Library, folder: Path) -> None:
    split, unreadable = library.split, library.unreadable
    texts = f"{len(split.texts):,} captions" if library.captions else "no captions"
    print_line(f"{folder}: {len(split):,} photos, {texts}")
    if unreadable:
        print_line(f"unreadable photos, left out: {len(unreadable):,}", style="yellow")
        for one in unreadable[:MAX_NAMED]:
            print_line(f"  {one}")
        if len(unreadable) > MAX_NAMED:
            print_line(f"  … and {len(unreadable) - MAX_NAMED:,} more")
    if library.skipped:
        counts = ", ".join(f"{count:,} × {kind}" for kind, count in library.skipped.items())
        print_line(f"other files, skipped: {counts}")
