"""Columns of a table besides recalls (foils, wrong words, judgements, cost), and how it names runs.

| written | is |
| --- | --- |
| ``chan`` | the run of that name, of the seed in hand |
| ``chan@3`` | its fourth seed, whatever the seed in hand (``--seeds`` counts from 0) |
| ``chan@+1`` | the seed after the one in hand |
| ``"{run:chan@+1}"`` in a value | the folder of that run |
| ``"{guide:chan@+1,chan@+2}"`` in a value | the folder of a guide made of these runs |

Importing this module does not import torch, so that listing and checking are quick.
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
"""Captions of other images for foils: those that the row's run scores highest."""

WORD_NUMBERS = ("word_auc", "word_ap", "caption_auc", "caption_ap", "pair_accuracy")
TAU = "tau"
COST_NUMBERS = ("seconds", "device_seconds", "gpu_seconds", "updates", "best_epoch", "dev_rsum")


@dataclass(frozen=True)
class RunReference:
    """A run by its name, and which of its seeds."""

    name: str
    seed: int = 0
    relative: bool = True

    def at(self, seed: int) -> int:
        """The seed that is meant where ``seed`` is in hand."""
        return seed + self.seed if self.relative else self.seed


def run_reference(text: str) -> RunReference:
    """
    >>> run_reference("chan@+2").at(1), run_reference("chan@2").at(1), run_reference("chan").at(1)
    (3, 2, 1)
    """
    name, at, seed = text.strip().partition("@")
    if not at:
        return RunReference(name)
    found = _SEED.fullmatch(seed)
    if found is None or not name:
        raise ValueError(
            f"'{text.strip()}': a run of another seed is written {name or 'name'}@0 (the first of "
            f"its seeds) or {name or 'name'}@+1 (the one after the seed in hand)"
        )
    return RunReference(name, int(found[2]), relative=bool(found[1]))


def references(value: Any) -> list[str]:
    """Every ``run:…`` and ``guide:…`` in braces anywhere in a tree, each once."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return list(dict.fromkeys(found for item in value for found in references(item)))
    return list(dict.fromkeys(REFERENCE.findall(value))) if isinstance(value, str) else []


def replace_references(value: Any, to: Callable[[str], str]) -> Any:
    """The tree with what each reference stands for in its place."""
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
    """One number of a `FoilReport`, on foils of some source, or of a `WordReport`.

    ``foils`` are by ``rules``, by the row's ``own`` run, or by another run (``tags@+1``); where it
    is left out, the number is of the words of captions made false from the truth of drawn scenes.
    With ``rules``, numbers of a `WordReport` are of the words that the rules exchanged. Foils can
    also be captions of other images (`RETRIEVED`). A run that writes ``blind`` gets blank images.

    ``judgements`` is a file of people's judgements in the folder of the data; its number is
    ``tau``. Numbers of the cost are of the run alone, and need neither.
    """

    title: str
    number: str
    foils: str | None = None
    judgements: str | None = None
    decimals: int = Field(1, ge=0)
    blind: bool = False

    @property
    def writer(self) -> str | None:
        """The run that writes the foils, where another one than the row's does."""
        return None if self.foils in (None, RULES, OWN, *RETRIEVED) else self.foils

    def of_row(self, foils: str | None, blind: bool) -> Self:
        """The column as a row has it that names the source of its ``own`` foils."""
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
    def of_rule_words(self) -> bool:
        return self.foils == RULES and self.number in WORD_NUMBERS

    @property
    def _known(self) -> tuple[str, ...]:
        if self.judgements is not None:
            return (TAU,)
        if self.foils is None:
            return (*WORD_NUMBERS, *COST_NUMBERS)
        return (*FOIL_NUMBERS, *WORD_NUMBERS) if self.foils == RULES else FOIL_NUMBERS

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        known = self._known
        if self.judgements is not None and self.foils is not None:
            raise ValueError(f"column '{self.title}': either foils or judgements")
        if self.number not in known:
            raise ValueError(
                f"column '{self.title}': unknown number '{self.number}'"
                f"{nearest(self.number, known)} (known: {', '.join(known)})"
            )
        if self.writer is not None:
            run_reference(self.writer)
        return self


class FoilOptions(Section):
    """How many foils columns are measured on, and how runs write them."""

    per_caption: int = Field(1, ge=1)
    captions: int | None = Field(None, ge=1, description="drawn at random; all where absent")
    seed: int = Field(1, ge=0)
    masks: int = Field(5, ge=1)
    samples: int = Field(5, ge=1)
    temperature: float = Field(1.5, gt=0)
    unit: Literal["graph", "word"] = "graph"
