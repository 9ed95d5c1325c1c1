"""What the arguments of a command refer to: runs, data sets, images, indexes, key=value options."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterfoil.cli.output import progress
from counterfoil.core.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from PIL import Image

    from counterfoil.core.progress import Progress
    from counterfoil.data.fragments import Fragments
    from counterfoil.data.pairs import Pairs, Split
    from counterfoil.models.model import Model
    from counterfoil.search import SearchIndex


def check_inputs(
    runs: Iterable[Path | None],
    data: str | None = None,
    format: str | None = None,
    *,
    photos: bool = False,
) -> None:
    """Refuse folders and paths that do not exist, before seconds are spent on importing torch.

    With ``photos``, the data may be a folder of images without captions.
    """
    from counterfoil.core.config import model_folder
    from counterfoil.data.load import check_source
    from counterfoil.data.photos import has_only_photos

    for run in runs:
        if run is not None:
            model_folder(run)
    if data is not None and not (photos and has_only_photos(data, format)):
        check_source(data, format)


def check_out(out: Path | None) -> None:
    """Refuse an output file that could not be written, before the work for it begins."""
    from counterfoil.core.storage.atomic import file_obstacle

    if out is not None and (problem := file_obstacle(out)):
        raise ConfigError(f"--out {out}: {problem}")


def check_picture(out: Path | None, image: str | Path | None = None) -> None:
    """Refuse a picture that is not named as a PNG or cannot be written, before the work for it.

    It must not replace the ``image`` that it is about.
    """
    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: pictures are written as PNG; choose a name ending in .png")
    check_out(out)
    if out is None or image is None or not (os.path.exists(out) and os.path.exists(image)):
        return
    if os.path.samefile(out, image):
        raise ConfigError(f"--out {out}: this is the image itself; choose another name")


def open_index(folder: Path, api_key: str, device: str) -> SearchIndex:
    """An index on disk; torch is imported only if there is one."""
    check_index(folder)
    from counterfoil.search import SearchIndex

    secret = {"api_key": api_key} if api_key else None
    return SearchIndex.open(folder, device=device, backend_options=secret)


def check_index(folder: Path) -> None:
    if not (folder / "index.json").is_file():
        raise DataError(
            f"{folder}: not a search index (there is no index.json); "
            "make one with: counterfoil index RUN PAIRS --out INDEX"
        )


def parse_options(pairs: Sequence[str] | None, name: str = "--option") -> dict[str, Any]:
    """``--option images=1000`` to a mapping with YAML values; ``name`` is that of the option."""
    import yaml

    from counterfoil.core.config import read_value

    options: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name} {pair}: expected key=value")
        try:
            options[key.strip()] = read_value(value)
        except (yaml.YAMLError, ValueError):
            raise ConfigError(f"{name} {pair}: '{value}' is not a YAML value") from None
    return options


@dataclass(frozen=True)
class DataChoice:
    """The data that --data, --format and --option name; without --data, that of a run."""

    data: str | None
    format: str | None
    option: list[str] | None
    cache: Path
    quiet: bool

    @property
    def options(self) -> dict[str, Any]:
        return parse_options(self.option)

    @property
    def progress(self) -> Progress:
        return progress(self.quiet)

    def read(
        self,
        run: Path,
        splits: Collection[str] | None = None,
        *,
        photos: bool = False,
        whole: bool = False,
        check: Callable[[Pairs], None] | None = None,
    ) -> Pairs:
        """All splits, with the features that the run reads; of named data, those of ``splits``.

        With ``photos``, the data may be a folder of images without captions. With ``whole``, named
        data that state no splits are one split. ``check`` may refuse the data, if they are named
        before their features are extracted.
        """
        from counterfoil.training.run_data import data_for_run

        given = (self.data, self.format, self.options, self.cache, self.progress)
        return data_for_run(run, *given, splits, photos=photos, whole=whole, check=check)

    @staticmethod
    def named(data: Pairs, names: Sequence[str] | None) -> list[Split]:
        """The splits of these names; without names, all."""
        return [data[name] for name in names] if names else list(data)

    def read_image(
        self, run: Path, model: Model, image: str, split: str | None = None
    ) -> tuple[Fragments, Image.Image | None, list[str]]:
        """Fragments, pixels and captions of an image file or id; a file has no captions."""
        if Path(image).is_file():
            return (*_from_file(model, run, Path(image)), [])
        _refuse_missing_file(image, run, self.data)
        return _from_data(model, self.read(run, None if split is None else [split]), image, split)


def _from_file(model: Model, run: Path, path: Path) -> tuple[Fragments, Image.Image | None]:
    if model.fragments_from is None:
        raise ConfigError(
            f"{run}: this model was trained on precomputed features, so it cannot read an image "
            "file; give the id of an image of its data set instead"
        )
    return model.reader.read(path)


def _refuse_missing_file(image: str, run: Path, data: str | None) -> None:
    """Refuse a folder, and a name that no data set could resolve."""
    from counterfoil.training.run_folder import run_config

    if Path(image).is_dir():
        raise DataError(f"{image}: a folder; give an image file, or the id of an image")
    if Path(image).exists():
        raise DataError(f"{image}: not a regular file; give an image file, or the id of an image")
    if data is None and run_config(run) is None:
        raise DataError(
            f"{image}: no such image file; to use the id of an image, name its data with --data"
        )


def _from_data(
    model: Model, pairs: Pairs, image: str, split: str | None
) -> tuple[Fragments, Image.Image | None, list[str]]:
    from counterfoil.data.images import open_image

    searched = [pairs[split]] if split is not None else list(pairs)
    for one in searched:
        if image in one.ids:
            index = list(one.ids).index(image)
            break
    else:
        names = ", ".join(one.name for one in searched)
        known = [name for one in searched for name in one.ids]
        example = f" (ids look like '{known[0]}')" if known else ""
        raise DataError(
            f"{image}: neither an image file nor an id in the data set '{pairs.name}', splits: "
            f"{names}{nearest(image, known)}{example}"
        )
    table = model.fragments_of(one)
    pixels = open_image(one.pixels[index]) if one.pixels is not None else None
    return table.read(index), pixels, list(one.captions[index])
