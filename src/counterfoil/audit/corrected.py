"""The audited data with the reviewers' decisions applied: a corrected copy and its diff.

The copy has the layout of the original, which is never written. Data without captions in text
files (scenes, shards, features, Parquet) become one table of all splits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterfoil.audit.decisions import DecisionLog, Review, key_of
from counterfoil.audit.findings import FORMULA, Finding, numbered_lines, read_findings
from counterfoil.audit.report import IMAGES_FILE, SUMMARY
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.locks import locked_target
from counterfoil.core.storage.reading import read_text
from counterfoil.data.formats.base import RESERVED, Draft, Item
from counterfoil.data.formats.rewrite import Rewritten, can_rewrite, caption_files, locate, rewrite
from counterfoil.data.formats.text_edits import CaptionChange, Edit, TextCopy
from counterfoil.data.formats.text_files import csv_row, json_bytes, merge_extras
from counterfoil.data.images import FileImage
from counterfoil.data.load import (
    are_read_alike,
    is_named,
    make_named,
    open_source,
    path_options,
    read_path,
)
from counterfoil.data.pairs import Pairs, ProblemLog, Severity, count_kinds
from counterfoil.evaluation.report import Report

CORRECTED = "corrected"
"""Folder in the report for the copies that the page exports."""
DIFF = ".diff"
FOLDER_DIFF = "changes.diff"
TABLE = "table"
TABLES = (".csv", ".jsonl")
DEFAULT_TABLE = "captions.jsonl"
IMAGES_STAY = "the images stay where they are: read the copy with --option images=FOLDER"
NAMED_FIELDS = 5


@dataclass(frozen=True)
class DataSource:
    """How the audited data were read: a path or a name, its format and options."""

    path: str
    format: str | None
    options: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """JSON from which another folder can read the same data."""
        path = self.path
        paths = path_options(path, self.format) if self.options else set()
        options = {
            key: str(Path(value).resolve()) if key in paths and value is not None else value
            for key, value in self.options.items()
        }
        if not is_named(path, self.format):
            path = str(Path(path).resolve())
        return {"path": path, "format": self.format, "options": options}

    @classmethod
    def read(cls, folder: Path) -> DataSource | None:
        """The source that a report names; None if it names none."""
        try:
            tree = json.loads(read_text(folder / SUMMARY)).get("source")
        except (OSError, ValueError, AttributeError, RecursionError):
            return None
        if not isinstance(tree, dict) or not isinstance(tree.get("path"), str):
            return None
        form, options = tree.get("format"), tree.get("options")
        return cls(
            tree["path"],
            form if isinstance(form, str) else None,
            options if isinstance(options, dict) else {},
        )


class Exported(Report):
    """What was written: files and diff, changes made, and findings that changed nothing.

    ``missing`` counts decisions on captions that the data do not have (any more). ``emptied`` are
    images that lost all captions.
    """

    files: tuple[str, ...]
    diff: str
    layout: str
    fixed: int
    discarded: int
    kept: int
    open: int
    conflicts: int
    unknown: int
    missing: int
    emptied: tuple[str, ...]
    notes: tuple[str, ...]


def export_corrected(
    folder: Path,
    out: Path,
    *,
    source: DataSource | None = None,
    cache: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the data of an audit with its decisions applied, and the diff.

    ``out`` is a file, or a folder for data with several caption files. ``source`` replaces the one
    that the report names.
    """
    findings = read_findings(folder)
    review = Review.of(DecisionLog(folder), findings)
    changes = caption_changes(findings, review)
    source = source or DataSource.read(folder)
    result, layout, notes = _rewritten(folder, out, source, cache, changes, progress)
    targets = _targets(out, result.copies)
    originals = [file for file in folder.iterdir() if file.is_file()]
    originals += [copy.path for copy in result.copies] if layout != TABLE else []
    diff = out / FOLDER_DIFF if _is_folder(out, result.copies) else out.with_name(out.name + DIFF)
    data = Path(source.path).resolve() if source is not None else None
    for target in (*targets, diff):
        is_own = data is None or _is_export(target, folder, data)
        _refuse_target(target, originals, None if is_own else data, overwrite)
    for target, copy in zip(targets, result.copies, strict=True):
        _refuse_other_format(target, copy.path)
    diffs = []
    with locked_target(out, "exporting there"):
        for target, copy in zip(targets, result.copies, strict=True):
            write_atomically(target, copy.edited())
            diffs.append(copy.diff())
        write_atomically(diff, "".join(diffs))
    counts = review.counts()
    missing = len(result.missing)
    if source is not None and layout != TABLE:
        notes += _name_notes(source, targets, result.copies)
    notes += _formula_notes(targets, result.copies)
    return Exported(
        files=tuple(map(str, targets)),
        diff=str(diff),
        layout=layout,
        fixed=sum(c.new is not None for c in changes) - _count(result.missing, removed=False),
        discarded=sum(c.new is None for c in changes) - _count(result.missing, removed=True),
        kept=counts["kept"],
        open=counts["open"],
        conflicts=counts["conflicts"],
        unknown=counts["unknown"],
        missing=missing,
        emptied=tuple(result.emptied),
        notes=tuple(notes),
    )


def _count(changes: Sequence[CaptionChange], *, removed: bool) -> int:
    return sum((change.new is None) is removed for change in changes)


def caption_changes(findings: Sequence[Finding], review: Review) -> list[CaptionChange]:
    """The changes that decisions make, in the order of the findings."""
    changes = []
    for finding in findings:
        final = review.of_finding(finding).final
        if final is None or final.outcome[0] == "keep":
            continue
        key = key_of(finding)
        changes.append(CaptionChange(*key, new=final.outcome[1]))
    return changes


def _rewritten(
    folder: Path,
    out: Path,
    source: DataSource | None,
    cache: Path | None,
    changes: Sequence[CaptionChange],
    progress: Progress | None,
) -> tuple[Rewritten, str, list[str]]:
    """Edited copies of the data's files, the layout in words, and notes."""
    if source is None:
        why = "the report does not name data that can be read again"
        return _as_table(_report_items(folder), why, out, changes)
    if is_named(source.path, source.format):
        pairs = make_named(source.path, source.options, cache, progress)
        why = f"'{source.path}' is a generated data set"
        return _as_table(_pairs_items(pairs), why, out, changes)
    log = ProblemLog()
    path = Path(source.path)
    reader = open_source(path, source.format, source.options, log)
    draft = reader.read(path, log)
    log.refuse_fatal()
    if not can_rewrite(reader, draft):
        why = f"{path.name} has its captions in no text file of a known layout"
        left_out = ProblemLog()
        pairs = read_path(path, source.format, source.options, left_out, drop=True)
        hashed = {(item.split, item.id) for item in draft.items if not item.split_is_stated}
        folder = Path(source.options.get("images") or (path if path.is_dir() else path.parent))
        table, layout, notes = _as_table(_pairs_items(pairs, folder, hashed), why, out, changes)
        return table, layout, [*notes, *_notes_on_left_out(left_out)]
    return rewrite(reader, draft, changes), _layout(draft), _place_notes(draft, out)


def _table_notes(path: Path, why: str, items: Sequence[Item], has_images: bool) -> list[str]:
    is_csv = path.suffix.lower() == ".csv"
    kind = "CSV" if is_csv else "JSON lines"
    parts = " of all splits" if any(item.split_is_stated for item in items) else ""
    notes = [f"{why}, so the copy is one table{parts} ({kind}); images and features stay there"]
    fields = sorted({key for item in items for key in item.extras} - {"image"})
    if is_csv and fields:
        named = ", ".join(fields[:NAMED_FIELDS]) + (" …" if len(fields) > NAMED_FIELDS else "")
        notes.append(f"other fields are not in the CSV ({named}); a .jsonl file has them")
    return [*notes, IMAGES_STAY] if has_images else notes


def _notes_on_left_out(log: ProblemLog) -> list[str]:
    """What of the data cannot be read is in no item, so it is not in a table of these."""
    skipped = [problem for problem in log.problems if problem.severity is Severity.SKIP]
    if not skipped:
        return []
    kinds = ", ".join(f"{kind}: {number}" for kind, number in count_kinds(skipped).items())
    return [
        f"what cannot be read is not in the copy ({kinds}; the first: {skipped[0].where}, "
        f"{skipped[0].message})"
    ]


def _layout(draft: Draft) -> str:
    return ", ".join(dict.fromkeys(path.suffix.lstrip(".") for path in caption_files(draft)))


def _place_notes(draft: Draft, out: Path) -> list[str]:
    """What changes for a reader of the copy because it has another name or folder."""
    files = caption_files(draft)
    parent = out if len(files) > 1 else out.parent
    notes = []
    if any(parent.resolve() == file.parent.resolve() for file in files):
        notes.append(f"{parent} has the original, too: name the copy itself to read it")
    elif any(item.image is not None for item in draft.items):
        notes.append(IMAGES_STAY)
    return notes


def _name_notes(
    source: DataSource, targets: Sequence[Path], copies: Sequence[TextCopy]
) -> list[str]:
    """A note for each copy that is read in another way than the original because of its name."""
    reader = open_source(Path(source.path), source.format, source.options, ProblemLog())
    return [
        f"by the name {target.name}, the copy is read as another format or split than "
        f"{copy.path.name}: give it that name, in another folder"
        for target, copy in zip(targets, copies, strict=True)
        if not are_read_alike(reader, target, copy.path)
    ]


def _formula_notes(targets: Sequence[Path], copies: Sequence[TextCopy]) -> list[str]:
    """Captions are data, so none is escaped; new ones that a spreadsheet would run are named."""
    risky = [
        change
        for target, copy in zip(targets, copies, strict=True)
        if target.suffix.lower() in (".csv", ".tsv")
        for change in copy.changes
        if change.new and change.new.startswith(FORMULA)
    ]
    if not risky:
        return []
    one = len(risky) == 1
    return [
        f"{'1 correction starts' if one else f'{len(risky)} corrections start'} with =, +, - or @, "
        f"such as {risky[0].new!r}: a spreadsheet would read "
        f"{'it as a formula; it is' if one else 'them as formulas; they are'} written unchanged"
    ]


# Targets: never the original.


def _is_folder(out: Path, copies: Sequence[TextCopy]) -> bool:
    return len(copies) > 1 or out.is_dir()


def _targets(out: Path, copies: Sequence[TextCopy]) -> list[Path]:
    if not _is_folder(out, copies):
        return [out]
    if out.exists() and not out.is_dir():
        names = ", ".join(copy.path.name for copy in copies)
        raise ConfigError(f"{out}: is a file, but the data have several ({names}); name a folder")
    targets = [out / copy.path.name for copy in copies]
    if len(set(targets)) < len(targets):
        raise DataError(
            f"{out}: two caption files of the data have the same name; export one split"
        )
    return targets


def _is_export(target: Path, report: Path, data: Path) -> bool:
    """Whether a target is in the report's folder of copies; the report may lie in the data."""
    exports = (report / CORRECTED).resolve()
    return target.resolve().is_relative_to(exports) and not data.is_relative_to(exports)


def _refuse_target(
    target: Path, originals: Sequence[Path], data: Path | None, overwrite: bool
) -> None:
    """Raise if a target is one of the originals, or any other file in the folder of data."""
    if not target.exists():
        return
    inside = data is not None and data.is_dir() and target.resolve().is_relative_to(data)
    if inside or any(target.samefile(original) for original in originals):
        raise ConfigError(
            f"{target}: is a file of the data or of the audit, which are never changed; name "
            "another --out"
        )
    if target.is_dir() or not target.is_file():
        raise ConfigError(f"{target}: not a regular file; name another --out")
    if not overwrite:
        raise ConfigError(f"{target}: exists already; name another --out, or use --overwrite")


_FORMATS = {
    **dict.fromkeys((".csv", ".txt"), "CSV"),
    ".tsv": "TSV",
    **dict.fromkeys((".jsonl", ".ndjson"), "JSON Lines"),
    ".json": "JSON",
    ".parquet": "Parquet",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "spreadsheet"),
}


def _refuse_other_format(target: Path, original: Path) -> None:
    """Refuse a name by which the copy would be read in another format than it has."""
    own, other = (_FORMATS.get(path.suffix.lower()) for path in (original, target))
    if other is not None and other != own:
        ending = f"that ends in {original.suffix}" if original.suffix else "without an ending"
        raise ConfigError(
            f"{target}: the copy has the format of the original, {original.name}; choose a name "
            f"{ending}"
        )


# One table of all splits, for data that have no text files.


def _pairs_items(
    pairs: Pairs, folder: Path | None = None, hashed: Collection[tuple[str, str]] = ()
) -> Iterator[Item]:
    """The images of the data; names of image files are relative to ``folder`` if they are in it.

    ``hashed`` are the splits and ids of images whose split the data do not state.
    """
    for split in pairs:
        for index, image in enumerate(split.ids):
            extras = dict(split.extras[index]) if split.extras is not None else {}
            pixels = split.pixels[index] if split.pixels is not None else None
            if folder is not None and isinstance(pixels, FileImage):
                inside = pixels.path.is_relative_to(folder)
                path = pixels.path.relative_to(folder) if inside else pixels.path.absolute()
                extras["image"] = path.as_posix()
            captions = list(split.captions[index])
            item = Item(image, split.name, captions, Path(pairs.name), extras=extras)
            item.split_is_stated = (split.name, image) not in hashed
            yield item


def _report_items(folder: Path) -> Iterator[Item]:
    """The audited images; a report that names no source lists all of them."""
    path = folder / IMAGES_FILE
    for number, line in numbered_lines(path):
        try:
            tree = json.loads(line)
            split, image = str(tree["split"]), str(tree["id"])
            texts = [str(text) for text in tree["captions"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: line {number}: damaged ({error!r})") from None
        pixels = tree.get("pixels")
        has_file = isinstance(pixels, dict) and isinstance(pixels.get("file"), str)
        yield Item(image, split, texts, path, extras={"image": pixels["file"]} if has_file else {})


def _as_table(
    items: Iterable[Item], why: str, out: Path, changes: Sequence[CaptionChange]
) -> tuple[Rewritten, str, list[str]]:
    """All images as one text, the edits that the changes make in it, and notes."""
    path = out / DEFAULT_TABLE if out.is_dir() else out
    if path.suffix.lower() not in TABLES:
        raise ConfigError(f"{out}: these data are written as one table; name a .csv or .jsonl file")
    listed = list(items)
    matched, missing, emptied = locate(listed, changes)
    new: dict[int, dict[int, str | None]] = {}
    for item, number, change in matched:
        new.setdefault(id(item), {})[number] = change.new
    has_images = any("image" in item.extras for item in listed)
    split = ["split"] if any(item.split_is_stated for item in listed) else []
    columns = ["id", *split, "caption", *(["image"] if has_images else [])]
    form = _csv_rows if path.suffix.lower() == ".csv" else _json_rows
    parts = [csv_row(columns)] if form is _csv_rows else []
    copy = TextCopy(path, "", changes=[change for _, _, change in matched])
    offset = sum(map(len, parts))
    for item in listed:
        wanted = new.get(id(item), {})
        texts = [wanted.get(number, text) for number, text in enumerate(item.captions)]
        for record, edited in form(item, item.captions, texts, columns):
            if edited != record:
                copy.edits.append(Edit(offset, offset + len(record), edited))
            parts.append(record)
            offset += len(record)
    copy.text = "".join(parts)
    return Rewritten([copy], missing, emptied), TABLE, _table_notes(path, why, listed, has_images)


def _csv_rows(
    item: Item, captions: Sequence[str], new: Sequence[str | None], columns: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """A row per caption, before and after the changes."""
    split = [item.split if item.split_is_stated else ""] if "split" in columns else []
    image = [item.extras.get("image", "")] if "image" in columns else []
    for text, other in zip(captions, new, strict=True):
        after = "" if other is None else csv_row([item.id, *split, other, *image])
        yield csv_row([item.id, *split, text, *image]), after


def _json_rows(
    item: Item, captions: Sequence[str], new: Sequence[str | None], _columns: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """A row per image, before and after the changes."""
    extras = dict(item.extras)
    record: dict[str, Any] = {"id": item.id}
    if item.split_is_stated:
        record["split"] = item.split
    if "image" in extras:
        record["image"] = extras.pop("image")
    left = [text for text in new if text is not None]
    before, after = (
        json_bytes(merge_extras({**record, "captions": list(texts)}, extras, RESERVED)).decode()
        for texts in (captions, left)
    )
    yield f"{before}\n", f"{after}\n"
