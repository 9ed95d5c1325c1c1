"""The source "karpathy": Karpathy's splits of Flickr8k, Flickr30k and COCO as one JSON file.

The ids of sentences become extras; their tokens do not, since they follow from the text.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from counterfoil.core.errors import ConfigError, nearest
from counterfoil.core.storage.reading import open_regular
from counterfoil.data.formats.base import Draft, Item, Source, sources
from counterfoil.data.formats.image_files import image_folder
from counterfoil.data.formats.text_files import read_json
from counterfoil.data.pairs import ProblemLog

_RESTVAL = ("train", "drop", "keep")
_IMAGE_FOLDERS = (
    ".",
    "images",
    "Images",
    "flickr8k-images",
    "flickr30k-images",
    "Flicker8k_Dataset",
    "Flickr8k_Dataset",
    "coco",
)
_NOT_EXTRA = {"sentences", "split", "filename", "sentids"}


@sources.register("karpathy")
class KarpathySource(Source):
    """Karpathy's splits of Flickr8k, Flickr30k and COCO: one JSON file and a folder of images.

    ``images`` is that folder. ``restval`` is what to do with COCO's extra images: add them to
    ``train`` (the usual protocol), ``drop`` them, or ``keep`` them as a split of their own.
    """

    looks_for = "dataset_*.json (Karpathy's splits), or a folder with one"
    examples = ("dataset_flickr8k.json", "dataset_flickr30k.json", "dataset_coco.json")

    def __init__(self, *, images: str | Path | None = None, restval: str = "train") -> None:
        if restval not in _RESTVAL:
            raise ConfigError(
                f"restval: unknown choice '{restval}'{nearest(restval, _RESTVAL)} "
                f"(choices: {', '.join(_RESTVAL)})"
            )
        self.images = images
        self.restval = restval

    @classmethod
    def matches(cls, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob("dataset_*.json")) or (path / "dataset.json").is_file()
        if path.suffix != ".json":
            return False
        return path.name.startswith("dataset") or _has_sentences(path)

    def read(self, path: Path, log: ProblemLog) -> Draft:
        draft = Draft(path.stem if path.is_file() else path.name)
        files = [path] if path.is_file() else sorted(path.glob("dataset*.json"))
        if len(files) != 1:
            log.fatal(
                "ambiguous-files",
                path,
                f"expected one dataset_*.json, found {', '.join(f.name for f in files) or 'none'}",
            )
            return draft
        file = files[0]
        content = read_json(file, log)
        if content is None:
            return draft
        images = content.get("images") if isinstance(content, dict) else None
        if not isinstance(images, list):
            log.fatal("bad-json", file, "expected an object with a list 'images'")
            return draft
        for number, record in enumerate(images):
            item = self._item(record, file, number, log)
            if item is not None:
                draft.items.append(item)
        self._find_images(draft, file, log)
        return draft

    def _item(self, record: Any, file: Path, number: int, log: ProblemLog) -> Item | None:
        where = f"{file}: images[{number}]"
        if not isinstance(record, dict) or not isinstance(record.get("filename"), str):
            log.fatal("bad-json", where, "expected an object with filename, split and sentences")
            return None
        split = record.get("split")
        sentences = record.get("sentences")
        if not isinstance(split, str) or not isinstance(sentences, list):
            log.fatal("bad-json", where, "has no split or no list of sentences")
            return None
        if split == "restval":
            if self.restval == "drop":
                return None
            split = "train" if self.restval == "train" else split
        image_id = record.get("cocoid", Path(record["filename"]).stem)
        split = "dev" if split == "val" else split
        item = Item(str(image_id), split, [], file, name=record["filename"])
        sentence_ids = []
        for index, sentence in enumerate(sentences):
            text = sentence_text(sentence)
            if text is None:
                log.fatal("bad-json", f"{where}.sentences[{index}]", "has no 'raw' text")
                continue
            item.captions.append(text)
            item.caption_paths.append((number, index))
            sentence_ids.append(sentence.get("sentid"))
        item.extras = {key: value for key, value in record.items() if key not in _NOT_EXTRA}
        item.extras["filename"] = record["filename"]
        if any(value is not None for value in sentence_ids):
            item.caption_extras["sentids"] = sentence_ids
        return item

    def _find_images(self, draft: Draft, file: Path, log: ProblemLog) -> None:
        folder = image_folder(self.images, file.parent, _IMAGE_FOLDERS, log)
        names = [_names(item) for item in draft.items]
        present = self.images is not None or folder.has_any(chain.from_iterable(names))
        if not present:
            log.note("no-image-folder", file, "no images beside it; name their folder (images)")
        for item, variants in zip(draft.items, names, strict=True):
            image = folder.find(variants, item.where, log)
            if present:
                item.image = image
                del item.extras["filename"]


def _names(item: Item) -> list[str]:
    """COCO's images are in the folder ``filepath``, or all in one folder."""
    name, folder = item.extras["filename"], item.extras.get("filepath")
    return [f"{folder}/{name}", name] if isinstance(folder, str) and folder else [name]


def sentence_text(sentence: Any) -> str | None:
    """The caption of a sentence: its text, or its tokens; None if it has neither."""
    if not isinstance(sentence, dict):
        return None
    if isinstance(sentence.get("raw"), str):
        return str(sentence["raw"])
    tokens = sentence.get("tokens")
    return " ".join(map(str, tokens)) if isinstance(tokens, list) else None


def _has_sentences(path: Path) -> bool:
    with open_regular(path) as file:
        return b'"sentences"' in file.read(1 << 16)
