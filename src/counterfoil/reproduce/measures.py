"""Columns of a table besides recalls: foils, single wrong words, people's judgements, the cost.

Importing this module does not import torch, so that listing and checking are quick.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from counterfoil.config import Section
from counterfoil.errors import nearest
from counterfoil.reproduce.references import run_reference

RULES, OWN = "rules", "own"
RETRIEVED = ("hardest-of-batch", "hardest-of-split")
"""Captions of other images for foils: those that the row's run scores highest."""
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
WORD_NUMBERS = ("word_auc", "word_ap", "caption_auc", "caption_ap", "pair_accuracy")
TAU = "tau"
COST_NUMBERS = ("seconds", "device_seconds", "gpu_seconds", "updates", "best_epoch", "dev_rsum")


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
