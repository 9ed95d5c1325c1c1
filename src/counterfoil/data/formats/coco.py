"""The source "coco": COCO's caption files (`captions_train2017.json`) with image folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from counterfoil.core.storage.reading import open_regular
from counterfoil.data.formats.base import Draft, Item, Source, sources
from counterfoil.data.formats.image_files import image_folder
from counterfoil.data.formats.text_files import read_json
from counterfoil.data.pairs import ProblemLog

_FILE = re.compile(r"captions_([A-Za-z]+?)_?(\d{4})?\.json$")
_NOT_EXTRA = {"id", "file_name"}


@sources.register("coco")
class CocoSource(Source):
    """COCO's caption annotations: one JSON file per split, with a folder of images each.

    ``images`` is the folder of images, or the folder that holds `train2017/` and the others.
    """

    looks_for = "captions_*.json (COCO annotations), or a folder with some (or with annotations/)"
    examples = ("captions_train2017.json", "captions_val2017.json", "annotations")

    def __init__(self, *, images: str | Path | None = None) -> None:
        self.images = images

    @classmethod
    def matches(cls, path: Path) -> bool:
        if path.is_dir():
            return bool(_files(path))
        if path.suffix != ".json":
            return False
        return bool(_FILE.search(path.name)) or _has_annotations(path)

    @classmethod
    def split_of_file(cls, path: Path) -> str | None:
        """The split with its year, which names the folder of images."""
        return "".join(_split_and_year(path))

    def read(self, path: Path, log: ProblemLog) -> Draft:
        draft = Draft(path.stem if path.is_file() else path.name)
        files = [path] if path.is_file() else _files(path)
        if not files:
            log.fatal("missing-file", path / "captions_train2017.json", "no such file")
        for file in files:
            name, year = _split_and_year(file)
            items = _read_file(file, "dev" if name == "val" else name, log)
            self._find_images(items, file, name + year, log)
            draft.items += items
        return draft

    def _find_images(self, items: list[Item], file: Path, name: str, log: ProblemLog) -> None:
        root = file.parent.parent if file.parent.name == "annotations" else file.parent
        folders = (name, f"images/{name}", f"images/{name}/{name}", "images", ".")
        option = Path(self.images) if self.images is not None else None
        if option is not None and (option / name).is_dir():
            option = option / name
        folder = image_folder(option, root, folders, log)
        present = option is not None or folder.has_any(item.extras["file_name"] for item in items)
        if not present:
            log.note("no-image-folder", file, "no images beside it; name their folder (images)")
        for item in items:
            image = folder.find([item.extras["file_name"]], item.where, log)
            if present:
                item.image = image
                del item.extras["file_name"]


def _split_and_year(file: Path) -> tuple[str, str]:
    match = _FILE.search(file.name)
    return (match.group(1).lower(), match.group(2) or "") if match else ("train", "")


def _files(path: Path) -> list[Path]:
    for folder in (path, path / "annotations"):
        files = [file for file in sorted(folder.glob("captions_*.json")) if _FILE.search(file.name)]
        if files:
            return files
    return []


def _read_file(file: Path, split: str, log: ProblemLog) -> list[Item]:
    content = read_json(file, log)
    if content is None:
        return []
    images = content.get("images") if isinstance(content, dict) else None
    annotations = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(images, list) or not isinstance(annotations, list):
        log.fatal("bad-json", file, "expected an object with lists 'images' and 'annotations'")
        return []
    items: list[Item] = []
    by_id: dict[str, Item] = {}
    for number, record in enumerate(images):
        item = _item(record, file, number, split, log)
        if item is not None:
            items.append(item)
            by_id.setdefault(item.id, item)
    for number, annotation in enumerate(annotations):
        _add_caption(annotation, number, by_id, f"{file}: annotations[{number}]", log)
    return items


def _item(record: Any, file: Path, number: int, split: str, log: ProblemLog) -> Item | None:
    valid = isinstance(record, dict) and "id" in record
    if not valid or not isinstance(record.get("file_name"), str):
        log.fatal("bad-json", f"{file}: images[{number}]", "expected an object with id, file_name")
        return None
    extras = {key: value for key, value in record.items() if key not in _NOT_EXTRA}
    extras["file_name"] = record["file_name"]
    return Item(str(record["id"]), split, [], file, extras=extras, name=record["file_name"])


def _add_caption(
    annotation: Any, number: int, by_id: dict[str, Item], where: str, log: ProblemLog
) -> None:
    valid = isinstance(annotation, dict) and "caption" in annotation
    if not valid or not isinstance(annotation["caption"], str | None):
        log.fatal("bad-json", where, "expected an object with image_id and caption")
        return
    item = by_id.get(str(annotation.get("image_id")))
    if item is None:
        log.fatal("unknown-image", where, f"no image has the id {annotation.get('image_id')!r}")
        return
    item.captions.append(annotation["caption"] or "")  # null is an empty caption, as in tables
    item.caption_paths.append((number,))
    item.caption_extras.setdefault("annotation_ids", []).append(annotation.get("id"))


def _has_annotations(path: Path) -> bool:
    with open_regular(path) as file:
        head = file.read(1 << 16)
    return b'"file_name"' in head or (b'"annotations"' in head and b'"caption"' in head)
