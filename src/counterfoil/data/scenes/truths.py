"""The ground truth of a split, read from disk image by image: it outweighs the captions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from counterfoil.data.scenes.scene import Scene
from counterfoil.data.scenes.words import SceneCaption, Word
from counterfoil.reading import open_regular


class SceneTruths(Sequence[dict[str, Any]]):
    """Item ``i`` is {"scene": …, "words": one list a caption} of image ``i``."""

    def __init__(self, path: Path, starts: Sequence[int]) -> None:
        self.path = path
        self._starts = np.asarray(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with open_regular(self.path) as file:
            file.seek(int(self._starts[index]))
            item = json.loads(file.readline())
        words = [[Word.from_list(word).as_dict() for word in words] for words in item["words"]]
        return {"scene": item["scene"], "words": words}


def scene_of(extras: dict[str, Any]) -> Scene:
    """The scene graph from an item of a split's ``extras``."""
    return Scene.from_dict(extras["scene"])


def captions_of(extras: dict[str, Any], texts: Sequence[str]) -> list[SceneCaption]:
    """Captions with the truth of their words, from ``extras`` and the split's captions."""
    return [
        SceneCaption(text, tuple(Word.from_dict(word) for word in words))
        for text, words in zip(texts, extras["words"], strict=True)
    ]
