"""What every table and figure has: a paper, data sets, and runs with their settings in layers.

Importing this module does not import torch, so that listing and checking are quick.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Self

from counterfoil.config import Section
from counterfoil.errors import nearest
from counterfoil.reproduce.references import run_reference

Tree = dict[str, Any]

METRICS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")


class Layers(Section):
    """Settings of a run, in the layers of which those that apply are merged from first to last."""

    common: Tree = Field(default_factory=dict, description="whatever the data")
    paper: Tree = Field(default_factory=dict, description="with --data PATH: the paper's own")
    scenes: Tree = Field(default_factory=dict, description="with --data scenes")
    by_data: dict[str, Tree] = Field(
        default_factory=dict, description="by `settings` of a data set"
    )
    smoke: Tree = Field(default_factory=dict, description="with --scale smoke")
    scenes_smoke: Tree = Field(default_factory=dict, description="with both")


class RunSpec(Layers):
    """One training, over the base; ``like`` starts from another one of the same file."""

    like: str | None = None
    beside: Tree = Field(
        default_factory=dict, description="terms added to its objective, whatever that is"
    )
    change: Tree = Field(
        default_factory=dict, description="single keys by their full names, in every layer"
    )
    ignores: list[str] = Field(
        default_factory=list, description="keys, by their full names, that no override reaches"
    )


class DataSet(Section):
    """A data set that numbers were published for, and how runs are judged on it."""

    title: str
    detect: list[str] = Field(default_factory=list, description="parts of a folder's name")
    settings: str | None = Field(None, description="key of `by_data` in base and runs")
    folds: int | None = Field(None, ge=0, description="where not as the runs' config says")
    elsewhere: bool = Field(False, description="the numbers are of other data than the runs")


class Artefact(Section):
    """What all kinds share."""

    name: str = Field("", description="by which it is asked for; that of its file")
    title: str
    summary: str
    paper: str
    note: str | None = None
    data_sets: dict[str, DataSet] = Field(default_factory=dict)
    base: Layers = Layers()
    runs: dict[str, RunSpec]

    @property
    def used(self) -> list[str]:
        """The runs that it shows, each once; ``name@+1`` is one of another seed."""
        return []

    @model_validator(mode="after")
    def _refers_to_what_is_there(self) -> Self:
        for text in self.used:
            self.layers(run_reference(text).name)
        return self

    def layers(self, name: str) -> list[RunSpec]:
        """The settings of a run: those of the runs it is like, then its own."""
        return [self.runs[one] for one in self.lineage(name)]

    def lineage(self, name: str) -> list[str]:
        """The runs that a run is like, the first of them first, and itself."""
        seen: list[str] = []
        here: str | None = name
        while here is not None:
            if here in seen:
                raise ValueError(f"run '{name}': 'like' goes round in a circle")
            if here not in self.runs:
                raise ValueError(f"unknown run '{here}'{nearest(here, self.runs)}")
            seen.insert(0, here)
            here = self.runs[here].like
        return seen
