"""Foils by the name of their source: ``rules``, a file of foils, or a model that writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from counterfoil.data.pairs import Split
from counterfoil.errors import ConfigError
from counterfoil.evaluation.foil_sets import FoilSet, rule_set, stored_set
from counterfoil.evaluation.foil_writing import written_set
from counterfoil.foils import DEFAULT_KINDS
from counterfoil.models.model import Model
from counterfoil.objectives.services import GeneratorOptions, MaskUnit
from counterfoil.progress import Progress

RULES = "rules"


@dataclass(frozen=True)
class FoilChoice:
    """How many foils of how many captions, and how a model writes them.

    A model that writes ``blind`` gets blank images: it goes by the language alone.
    The seed is another one than that of training, whose foils the model may have learned from.
    """

    per_caption: int = 1
    captions: int | None = None
    seed: int = 1
    masks: int = 5
    samples: int = 5
    temperature: float = 1.5
    unit: MaskUnit = "graph"
    extractor: str = "rules"
    blind: bool = False

    def __post_init__(self) -> None:
        if min(self.per_caption, self.masks, self.samples) < 1:
            raise ConfigError("foils: per caption, masks and samples must all be at least 1")

    @property
    def generation(self) -> GeneratorOptions:
        return GeneratorOptions(
            masks=self.masks,
            samples=self.samples,
            kept=self.per_caption,
            temperature=self.temperature,
            unit=self.unit,
            extractor=self.extractor,
        )


def is_rules(source: str) -> bool:
    """Whether foils are made by rule: that is a name even where a folder is called so."""
    return source.partition(":")[0] == RULES


def foils_by(
    source: str,
    split: Split,
    choice: FoilChoice,
    load: Callable[[Path], Model],
    progress: Progress | None = None,
) -> FoilSet:
    """Foils by ``rules`` (or ``rules:noun,swap``), of a JSONL file, or by the model of a folder."""
    if is_rules(source):
        kinds = source.partition(":")[2]
        return rule_set(
            split,
            kinds=tuple(kinds.split(",")) if kinds else DEFAULT_KINDS,
            per_caption=choice.per_caption,
            most=choice.captions,
            seed=choice.seed,
        )
    path = Path(source)
    if path.is_file():
        return stored_set(path, split, most=choice.captions, seed=choice.seed)
    if not path.is_dir():
        raise ConfigError(
            f"foils: '{source}' is neither '{RULES}' nor a JSONL file of foils nor the folder of a "
            "run that writes them"
        )
    return foils_of_model(load(path), path.resolve().name, split, choice, progress)


def foils_of_model(
    model: Model, name: str, split: Split, choice: FoilChoice, progress: Progress | None = None
) -> FoilSet:
    """What a model itself writes and holds to match best."""
    return written_set(
        model,
        split,
        choice.generation,
        name=name,
        most=choice.captions,
        seed=choice.seed,
        blind=choice.blind,
        progress=progress,
    )
