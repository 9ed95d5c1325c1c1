"""The source "flickr8k": lines `image.jpg#0<TAB>caption` and one list of images per split.

Flickr30k's `results_20130124.token` has the same form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from counterfoil.core.printable import plural
from counterfoil.data.formats.base import HASHED, Draft, Item, Source, hashed_splits, sources
from counterfoil.data.formats.image_files import image_folder
from counterfoil.data.formats.text_files import read_lines
from counterfoil.data.pairs import ProblemLog

_TEXT_FOLDERS = (".", "Flickr8k_text", "text")
_TOKEN_FILES = ("Flickr8k.token.txt", "*.token.txt", "*.token", "Flickr8k.lemma*")
_MAX_DIGITS = 9  # of a caption's number
_LIST_FILE = re.compile(r"([A-Za-z]+)Images\.txt$")
_IMAGE_FOLDERS = (
    "Flicker8k_Dataset",
    "Flickr8k_Dataset",
    "Flicker8k_Dataset/Flicker8k_Dataset",
    "Images",
    "images",
    "flickr30k-images",
    ".",
)


@sources.register("flickr8k")
class Flickr8kSource(Source):
    """Flickr8k as its authors published it: token file, lists of images, folder of images.

    ``images`` is the folder of images, ``captions`` the token file, if not the usual ones.
    """

    looks_for = "Flickr8k.token.txt with Flickr_8k.trainImages.txt … and a folder of images"
    examples = ("Flickr8k.token.txt", "Flickr_8k.trainImages.txt", "Flickr8k.lemma.token.txt")

    def __init__(
        self, *, images: str | Path | None = None, captions: str | Path | None = None
    ) -> None:
        self.images = images
        self.captions = captions

    @classmethod
    def matches(cls, path: Path) -> bool:
        return _token_file(path) is not None

    def read(self, path: Path, log: ProblemLog) -> Draft:
        root = path if path.is_dir() else path.parent
        draft = Draft(root.name)
        tokens = Path(self.captions) if self.captions is not None else _token_file(path)
        if tokens is None:
            log.fatal("missing-file", root / _TOKEN_FILES[0], "no such file")
            return draft
        captions = _read_captions(tokens, log)
        # The token file may be in a folder of texts beside the folder of images.
        above = [f"../{name}" for name in _IMAGE_FOLDERS] if path.is_file() else []
        images = image_folder(self.images, root, [*_IMAGE_FOLDERS, *above], log)
        has_images = self.images is not None or images.has_any(captions)
        if not has_images:
            log.note("no-image-folder", root, "no images beside it; name their folder (images)")
        for name, split, file, line in _listed(tokens, captions, log):
            lines = [number for number, _ in captions.get(name, [])]
            texts = [text for _, text in captions.get(name, [])]
            item = Item(Path(name).stem, split, texts, file, line=line)
            item.split_is_stated = file != tokens  # without lists, the token file names the images
            if lines:
                item.file, item.line, item.caption_lines = tokens, lines[0], lines
            image = images.find([name], item.where, log)
            if has_images:
                item.image = image
            else:
                item.extras["filename"] = name
            draft.items.append(item)
        return draft


def _token_file(path: Path) -> Path | None:
    if path.is_file():
        named = ".token" in path.name or path.name.startswith("Flickr8k.lemma")
        return path if named else None
    for pattern in _TOKEN_FILES:
        for folder in _TEXT_FOLDERS:
            for file in sorted((path / folder).glob(pattern)):
                return file
    return None


def _read_captions(path: Path, log: ProblemLog) -> dict[str, list[tuple[int, str]]]:
    """Captions with their line numbers, by image name, sorted by caption number."""
    numbered: dict[str, list[tuple[int, int, str]]] = {}
    for line, text in read_lines(path, log):
        if not text:
            continue
        head, tab, caption = text.partition("\t")
        name, mark, number = head.rpartition("#")
        if not (tab and mark and number.isdecimal() and len(number) <= _MAX_DIGITS):
            log.fatal("bad-line", f"{path}:{line}", "expected image.jpg#number<TAB>caption")
            continue
        numbered.setdefault(name, []).append((int(number), line, caption))
    return {
        name: [(line, caption) for _, line, caption in sorted(captions)]
        for name, captions in numbered.items()
    }


def _listed(
    tokens: Path, captions: dict[str, list[tuple[int, str]]], log: ProblemLog
) -> Iterator[tuple[str, str, Path, int]]:
    """Name, split, file and line of every image in a list."""
    lists = {
        match.group(1).lower(): file
        for file in sorted(tokens.parent.iterdir())
        if (match := _LIST_FILE.search(file.name))
    }
    if not lists:
        log.note(
            HASHED,
            tokens.parent,
            "no lists of images (Flickr_8k.trainImages.txt …); split 80/10/10 by a hash of the id",
        )
        splits = hashed_splits([Path(name).stem for name in captions])
        for (name, texts), split in zip(captions.items(), splits, strict=True):
            yield name, split, tokens, texts[0][0]
        return
    unlisted = set(captions)
    for split, file in lists.items():
        for line, text in read_lines(file, log):
            if text.strip():
                unlisted.discard(text.strip())
                yield text.strip(), split, file, line
    if unlisted:
        log.note(
            "unlisted-images",
            tokens,
            f"{plural(len(unlisted), 'image is', 'images are')} in no split's list and left out "
            f"(such as '{min(unlisted)}')",
        )
