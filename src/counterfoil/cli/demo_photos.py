"""`counterfoil demo PHOTOS`: search, explain and audit a folder of one's own photos."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from counterfoil.audit import DataSource, audit_split
from counterfoil.audit import write_report as write_audit
from counterfoil.cli.output import print_json, print_line
from counterfoil.core.errors import ConfigError, CounterfoilError, DataError
from counterfoil.core.printable import plural
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.locks import locked_folder
from counterfoil.core.zoo import resolve
from counterfoil.data.formats import sources
from counterfoil.data.formats.assemble import assemble
from counterfoil.data.formats.rewrite import caption_files
from counterfoil.data.images import FileImage
from counterfoil.data.load import open_source
from counterfoil.data.pairs import Pairs, Problem, ProblemLog, Split
from counterfoil.data.photos import is_photo, read_photos
from counterfoil.features import with_fragments
from counterfoil.models import Model
from counterfoil.search import SearchIndex
from counterfoil.training.run_folder import load_model

SEARCHER, EXPLAINER = "photos-vse", "photos-naaf"
SPLIT = "photos"

RUNS = Path("runs")
"""Where commands write by default; what is in it is not counted as skipped."""

MAX_AUDITED = 400
"""Most photos whose captions are audited; the time grows with the square of their number."""

MAX_NAMED = 5
"""Problems that are named; the others are counted."""

MAX_REASON = 300
"""Letters of the reason why a file is not used."""

ADVICE = "wait for it, or choose another --out"

MARK = ".counterfoil-demo"
"""File in the folder of a demo, which may therefore be made again."""


@dataclass(frozen=True)
class Captions:
    """The captions of a data set beside the photos; ``files`` are those that have them."""

    path: Path
    pairs: Pairs
    files: tuple[Path, ...]

    def items(self) -> Iterator[tuple[str, str, Sequence[str]]]:
        """(real path of the photo, its id in the data set, its captions)."""
        for split in self.pairs:
            for image, ref, texts in zip(
                split.ids, split.pixels or (), split.captions, strict=False
            ):
                if isinstance(ref, FileImage):
                    yield os.path.realpath(ref.path), image, texts

    def by_photo(self) -> dict[str, list[str]]:
        texts: dict[str, list[str]] = {}
        for path, _, captions in self.items():
            texts.setdefault(path, []).extend(captions)
        return texts


@dataclass(frozen=True)
class Library:
    """The photos of a folder; ``skipped`` counts files that are not used, by suffix."""

    pairs: Pairs
    captions: Captions | None
    skipped: dict[str, int]

    @property
    def split(self) -> Split:
        return self.pairs.splits[SPLIT]

    @property
    def unreadable(self) -> list[Problem]:
        left_out = ("unreadable-image", "bad-text")
        return [one for one in self.pairs.problems if one.kind in left_out]

    def captioned(self) -> Split:
        """The photos with captions, by their ids in the captions' data set: an export needs them.

        Of several photos with one id, the first.
        """
        row_of = {path: row for row, path in enumerate(_paths(self.split))}
        items: dict[str, tuple[int, Sequence[str]]] = {}
        for path, image, texts in self.captions.items() if self.captions else ():
            if path in row_of:
                items.setdefault(image, (row_of[path], texts))
        photos = self.split.select([row for row, _ in items.values()])
        return replace(photos, ids=list(items), captions=[texts for _, texts in items.values()])


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
    overwrite: bool = False,
) -> None:
    """Prepare a folder of photos, then serve it on ``port``, or print the command that does.

    An index or an audit in ``out`` that no demo made is replaced only with ``overwrite``.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; name a folder of photos")
    searching, explaining = (
        load_model(resolve(name, cache=cache)).eval() for name in (searcher, explainer)
    )
    for model in (searching, explaining):
        model.reader.extractor.fingerprint()  # raises now if its weights are not installed
    library = read_library(folder, bars, own_folders=(out / "index", out / "audit", cache))
    with locked_folder(out, "preparing photos there", ADVICE):
        _claim(out, overwrite)
        readable = _with_features(library, searching, cache, bars)
        SearchIndex.build(
            out / "index", searching, readable.split, overwrite=True, progress=bars
        ).close()
        explained = _with_features(library, explaining, cache, bars)
        try:
            audit = _audit(explaining, explainer, explained, out / "audit", bars)
        except DataError as error:  # such as captions in a language that the model cannot read
            bars.say(f"warning: captions not audited: {error}")
            audit = None
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


def read_library(folder: Path, bars: Progress, own_folders: Sequence[Path] = ()) -> Library:
    """All photos in a folder and below it, with the captions that a file beside them has.

    ``own_folders`` are written by the demo: what is in them is no part of the library.
    """
    root = Path(os.path.realpath(folder))
    own = {path for path in map(os.path.realpath, own_folders) if root in Path(path).parents}
    photos = read_photos(folder, SPLIT)
    split = photos.splits[SPLIT]
    rows = [row for row, path in enumerate(_paths(split)) if not _is_below(path, own)]
    if not rows:
        raise DataError(f"{folder}: no images but those that Counterfoil made; name another folder")
    split = split.select(rows)
    captions = _read_captions(folder, bars)
    texts = captions.by_photo() if captions else {}
    split = replace(split, captions=[texts.get(path, []) for path in _paths(split)])
    used = captions.files if captions else ()
    return Library(replace(photos, splits={SPLIT: split}), captions, _skipped(folder, used, own))


def _paths(split: Split) -> list[str]:
    """The real paths of the photos of a library."""
    return [os.path.realpath(ref.path) for ref in split.pixels or () if isinstance(ref, FileImage)]


def _is_below(path: str, folders: Collection[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _read_captions(folder: Path, bars: Progress) -> Captions | None:
    """The captions of the first file or folder that has some; reports why others are not used."""
    reasons: dict[Path, str] = {}
    used: Captions | None = None
    for path in _caption_sources(folder):
        if used is not None:
            if path not in used.files:
                names = ", ".join(file.name for file in used.files)
                reasons[path] = f"the captions are from {names}"
            continue
        try:
            captions = _open_captions(path)
        except CounterfoilError as error:  # also a missing extra: photos need no captions
            reasons[path] = " ".join(str(error).split())[:MAX_REASON]
            continue
        if any(captions.by_photo().values()):
            used = captions
        else:
            reasons[path] = "it has no captions of these photos"
    if used is not None or len(reasons) > 1:
        reasons.pop(folder, None)  # which failed for the same reason as the files in it
    for path, reason in list(reasons.items())[:MAX_NAMED]:
        bars.say(f"warning: {path}: not used as captions: {reason}")
    if len(reasons) > MAX_NAMED:
        bars.say(
            f"warning: … and {plural(len(reasons) - MAX_NAMED, 'more file')} not used as captions"
        )
    return used


def _open_captions(path: Path) -> Captions:
    log = ProblemLog()
    draft = open_source(path, None, {}, log).read(path, log)
    pairs = assemble(draft, log, drop=True)
    log.refuse_fatal()
    return Captions(path, pairs, tuple(caption_files(draft)))


def _caption_sources(folder: Path) -> Iterable[Path]:
    """The folder, if it has the layout of a data set; then files in it that are one themselves."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not is_photo(path.name))
    for path in (folder, *files):
        if any(sources[name].matches(path) for name in sources):
            yield path


def _skipped(folder: Path, used: Collection[Path], own: Collection[str]) -> dict[str, int]:
    """Numbers of files that are neither photos nor used captions, by suffix.

    Hidden files do not count, nor those that commands have written into a folder of runs.
    """
    own = {*own, os.path.realpath(RUNS)}
    known = {os.path.realpath(path) for path in used}
    counts: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if os.path.realpath(os.path.join(parent, name)) not in own
        ]
        counts.update(
            Path(name).suffix.lower() or "no suffix"
            for name in names
            if not name.startswith(".")
            and not is_photo(name)
            and os.path.realpath(os.path.join(parent, name)) not in known
        )
    return dict(counts.most_common())


def _claim(out: Path, overwrite: bool) -> None:
    """Mark a folder as a demo's; refuse it if it has what no demo made."""
    for name in () if overwrite or (out / MARK).exists() else ("index", "audit"):
        if (out / name).exists():
            raise ConfigError(
                f"{out / name}: not made by this demo; choose another --out, or replace it with "
                "--overwrite"
            )
    write_atomically(out / MARK, "index and audit in this folder are made by counterfoil demo\n")


def _with_features(library: Library, model: Model, cache: Path, bars: Progress) -> Library:
    features = (model.fragments_from or "segments", model.fragments_options)
    return replace(library, pairs=with_fragments(library.pairs, cache, *features, bars))


def _audit(model: Model, name: str, library: Library, out: Path, bars: Progress) -> Path | None:
    """Audit the captions of the first photos that have some; None if there are no captions."""
    if library.captions is None:
        return None
    captioned, source = library.captioned(), library.captions.path.resolve()
    if len(captioned) < 2:
        raise DataError("an audit compares photos; two or more with captions are needed")
    chosen = captioned.select(range(min(MAX_AUDITED, len(captioned))))
    notes = []
    if len(captioned) > len(chosen):
        command = ["counterfoil", "audit", name, str(source), "--out", str(out)]
        notes.append(
            f"The captions of {len(chosen)} of {len(captioned)} photos were audited. For all: "
            + shlex.join(command)
        )
    audit = audit_split(model, chosen, progress=bars)
    about = {"run": name, "model": model.spec.name, "data": library.pairs.name}
    with locked_folder(out, "writing an audit there", ADVICE):
        title = f"{library.pairs.name}, read by {name}"
        data = DataSource(str(source), None, {}).as_dict()
        write_audit(out, title, [audit], about, notes=notes, source=data)
    for note in notes:
        bars.say(note)
    return out


def _summary(library: Library) -> dict[str, Any]:
    split = library.split
    return {
        "photos": len(split),
        "captions": len(split.texts),
        "captions_from": str(library.captions.path) if library.captions else None,
        "unreadable": [str(one) for one in library.unreadable],
        "skipped": library.skipped,
    }


def _show(library: Library, folder: Path) -> None:
    split, unreadable = library.split, library.unreadable
    texts = "no captions"
    if library.captions:
        files = ", ".join(file.name for file in library.captions.files)
        texts = f"{plural(len(split.texts), 'caption')} from {files}"
    print_line(f"{folder}: {plural(len(split), 'photo')}, {texts}")
    if unreadable:
        print_line(f"unreadable photos, left out: {len(unreadable):,}", style="yellow")
        for one in unreadable[:MAX_NAMED]:
            print_line(f"  {one}")
        if len(unreadable) > MAX_NAMED:
            print_line(f"  … and {len(unreadable) - MAX_NAMED:,} more")
    if library.skipped:
        counts = ", ".join(f"{count:,} × {kind}" for kind, count in library.skipped.items())
        print_line(f"other files, skipped: {counts}")
