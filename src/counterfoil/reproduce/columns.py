"""Columns of a table besides recalls (foils, wrong words, judgements, cost), and run references.

A row is computed once per seed. References are relative to that seed:

| reference | meaning |
| --- | --- |
| ``chan`` | the run of that name with the row's seed |
| ``chan@3`` | its run with seed 3, for every seed of the row (seeds count from 0) |
| ``chan@+1`` | its run with the row's seed + 1 |
| ``"{run:chan@+1}"`` in a value | the folder of that run |
| ``"{guide:chan@+1,chan@+2}"`` in a value | the folder of a guide made from these runs |

This module does not import torch, so that listing and validation are fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from counterfoil.core.config import Section
from counterfoil.core.errors import nearest

REFERENCE = re.compile(r"\{((?:run|guide):[^}]+)\}")
_SEED = re.compile(r"(\+?)(\d+)")

RULES, OWN = "rules", "own"

RETRIEVED = ("hardest-of-batch", "hardest-of-split")
"""Sources of foils: the captions of other images that the row's run scores highest."""

WORD_NUMBERS = ("word_auc", "word_ap", "caption_auc", "caption_ap", "pair_accuracy")
TAU = "tau"
FORGETTING_NUMBERS = ("i2t_change", "t2i_change", "foil_change", "class_change")
"""Changes against the model that a run started from, of its forgetting report."""
COST_NUMBERS = ("seconds", "device_seconds", "gpu_seconds", "updates", "best_epoch", "dev_rsum")


@dataclass(frozen=True)
class RunReference:
    """The name of a run, and its seed: relative to the row's seed, or absolute."""

    name: str
    seed: int = 0
    relative: bool = True

    def at(self, seed: int) -> int:
        """The seed of the run for a row's seed."""
        return seed + self.seed if self.relative else self.seed


def run_reference(text: str) -> RunReference:
    """
    >>> run_reference("chan@+2").at(1), run_reference("chan@2").at(1), run_reference("chan").at(1)
    (3, 2, 1)
    """
    name, at, seed = text.strip().partition("@")
    if not at:
        return RunReference(name)
    match = _SEED.fullmatch(seed)
    if match is None or not name:
        raise ValueError(
            f"'{text.strip()}': a run of another seed is written {name or 'name'}@0 (its first "
            f"seed) or {name or 'name'}@+1 (the row's seed + 1)"
        )
    return RunReference(name, int(match[2]), relative=bool(match[1]))


def references(value: Any) -> list[str]:
    """Every distinct ``run:…`` and ``guide:…`` in braces in a tree."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return list(dict.fromkeys(text for item in value for text in references(item)))
    return list(dict.fromkeys(REFERENCE.findall(value))) if isinstance(value, str) else []


def replace_references(value: Any, to: Callable[[str], str]) -> Any:
    """The tree with every reference replaced by ``to(reference)``."""
    if isinstance(value, dict):
        return {key: replace_references(item, to) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_references(item, to) for item in value]
    return REFERENCE.sub(lambda m: to(m[1]), value) if isinstance(value, str) else value


FOIL_NUMBERS = (
    "accuracy",
    "false_accuracy",
    "caption_accuracy",
    "harder",
    "gap",
    "other_image",
    "own_image",
    "true_negatives",
    "false_negatives",
    "senseless",
    "undecided",
    "wod_auc",
    "wod_accuracy",
    "wod_found",
    "woc_accuracy",
    "perplexity_true",
    "perplexity_foils",
    "perplexity_corrected",
)


class MeasureColumn(Section):
    """A column besides recalls: one number of a `FoilReport`, a `WordReport` or a `Cost`.

    ``foils`` is their source: ``rules`` (or ``rules:word-swap``), the row's ``own`` run, another
    run (``tags@+1``), or captions of other images (`RETRIEVED`). A ``blind`` run writes them for
    blank images. With ``rules``, numbers of a `WordReport` are about the words that the rules
    replaced. Without ``foils``, they are about captions made false from the ground truth of drawn
    scenes.

    ``judgements`` is a file of human judgements in the folder of the data; its number is ``tau``.
    """

    title: str
    number: str
    foils: str | None = None
    judgements: str | None = None
    decimals: int = Field(1, ge=0)
    blind: bool = False

    @property
    def writer(self) -> str | None:
        """The run that writes the foils, if it is not the row's."""
        return None if self._by_rules or self.foils in (None, OWN, *RETRIEVED) else self.foils

    @property
    def _by_rules(self) -> bool:
        """Foils by all rules, or by named ones (``rules:word-swap``)."""
        return self.foils is not None and self.foils.partition(":")[0] == RULES

    def of_row(self, foils: str | None, blind: bool) -> Self:
        """The column for one row, which may set the source of its ``own`` foils."""
        if self.foils != OWN:
            return self
        return self.model_copy(update={"foils": foils or OWN, "blind": blind})

    @property
    def reads_fluency(self) -> bool:
        return self.number.startswith("perplexity")

    @property
    def is_cost(self) -> bool:
        return self.number in COST_NUMBERS

    @property
    def is_forgetting(self) -> bool:
        return self.number in FORGETTING_NUMBERS

    @property
    def of_rule_words(self) -> bool:
        return self.foils == RULES and self.number in WORD_NUMBERS

    @property
    def _known(self) -> tuple[str, ...]:
        if self.judgements is not None:
            return (TAU,)
        if self.foils is None:
            return (*WORD_NUMBERS, *COST_NUMBERS, *FORGETTING_NUMBERS)
        return (*FOIL_NUMBERS, *WORD_NUMBERS) if self.foils == RULES else FOIL_NUMBERS

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        known = self._known
        if self.judgements is not None and self.foils is not None:
            raise ValueError(f"column '{self.title}': give either foils or judgements")
        if self.number not in known:
            raise ValueError(
                f"column '{self.title}': unknown number '{self.number}'"
                f"{nearest(self.number, known)} (known: {', '.join(known)})"
            )
        if self.writer is not None:
            run_reference(self.writer)
        return self


class FoilOptions(Section):
    """Number of foils for the measured columns, and how runs write them."""

    per_caption: int = Field(1, ge=1)
    captions: int | None = Field(None, ge=1, description="drawn at random; all by default")
    seed: int = Field(1, ge=0)
    masks: int = Field(5, ge=1)
    samples: int = Field(5, ge=1)
    temperature: float = Field(1.5, gt=0)
    unit: Literal["graph", "word"] = "graph"
