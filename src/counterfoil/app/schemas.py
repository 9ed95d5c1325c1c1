"""Request and response schemas of the JSON API, which FastAPI validates and documents."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from counterfoil.app.connections import ID_LETTERS, RESULTS, TEXT_LETTERS, TEXT_WORDS, TEXTS
from counterfoil.app.content import Section
from counterfoil.app.review import State
from counterfoil.audit.corrected import Exported
from counterfoil.audit.decisions import (
    ANONYMOUS,
    CORRECTION_CHARS,
    REVIEWER_CHARS,
    Action,
    one_line,
)
from counterfoil.audit.findings import Finding
from counterfoil.data.text.words import words


def _unicode(text: str) -> str:
    """Refuse lone surrogates, which UTF-8 cannot encode, and control characters."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("contains a lone surrogate, which is not a character")
    if any(ord(letter) < 32 and letter not in "\t\n\r" for letter in text):
        raise ValueError("contains control characters")
    return text


def _sentence(text: str) -> str:
    count = len(words(_unicode(text)))
    if not count:
        raise ValueError("has no words")
    if count > TEXT_WORDS:
        raise ValueError(f"has {count} words; at most {TEXT_WORDS} are allowed")
    return text


Sentence = Annotated[str, Field(min_length=1, max_length=TEXT_LETTERS), AfterValidator(_sentence)]
ImageId = Annotated[str, Field(min_length=1, max_length=ID_LETTERS), AfterValidator(_unicode)]
Target = Literal["images", "captions"]
ModelName = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=ID_LETTERS,
        description="A served model, see `models` of /api/about. Default: the first.",
    ),
]


class RequestBody(BaseModel):
    """Base class of requests, which forbids unknown keys."""

    model_config = ConfigDict(extra="forbid")


class ScoreRequest(RequestBody):
    """Images by id, and sentences."""

    images: list[ImageId] = Field(min_length=1, max_length=TEXTS)
    texts: list[Sentence] = Field(min_length=1, max_length=TEXTS)
    model: ModelName = None


class ScoreResponse(BaseModel):
    """``scores[i][t]`` is the score of image ``i`` with text ``t``.

    ``unknown[t]`` are the words of text ``t`` outside the model's vocabulary; they are left out.
    """

    scores: list[list[float]]
    unknown: list[list[str]]


class SearchRequest(RequestBody):
    """A text or an image; without ``target``, a text finds images and an image captions."""

    text: Sentence | None = None
    image: ImageId | None = None
    k: int = Field(24, ge=1, le=RESULTS)
    target: Target | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.text is None) == (self.image is None):
            raise ValueError("give either text or image")
        return self


class Hit(BaseModel):
    """An image, or a caption with its image.

    Identical captions are one hit: ``count`` is their number, ``images`` lists their images.
    """

    id: str
    image: str
    count: int
    images: list[str]
    rank: int
    score: float
    text: str | None
    captions: list[str]


class SearchResponse(BaseModel):
    """Results, best first."""

    target: Target
    hits: list[Hit]
    unknown: list[str] = Field(description="Words that the model does not know; left out.")


class ExplainRequest(RequestBody):
    image: ImageId
    text: Sentence
    model: ModelName = None


class Word(BaseModel):
    """A word, its effect on the score, and its weights over regions.

    ``shade`` is the effect scaled to −1…1 for coloring, ``similarity`` the highest with a region.
    A word that is not ``known`` was left out; its effect is 0.
    """

    word: str
    effect: float
    positive: float
    negative: float
    region_weights: list[float] | None
    span: tuple[int, int] | None
    special: bool
    shade: float = 0.0
    similarity: float | None = None
    known: bool = True


class Normal(BaseModel):
    mean: float
    std: float


class Scale(BaseModel):
    """NAAF's boundary, and the similarities of words with right and with wrong images."""

    boundary: float
    matched: Normal | None
    mismatched: Normal | None


class Grid(BaseModel):
    """Regions that are the cells of a grid: a heat map can show them.

    ``cells[row * columns + column]`` is the index of a cell among the boxes; ``box`` is the part of
    the image that the grid covers.
    """

    rows: int
    columns: int
    box: tuple[float, float, float, float]
    cells: list[int]


class ExplainResponse(BaseModel):
    """The score of an image and a sentence, per word; boxes are in 0…1."""

    image: str
    text: str
    score: float
    boundary: float | None
    method: Literal[
        "parts", "leave-one-out", "mask", "gradient", "combined", "rollout", "discrimination"
    ]
    additive: bool
    note: str
    above: dict[str, float] | None = Field(
        description="Shares of right and of wrong dev pairs with a lower score; null if unknown."
    )
    standing: str = Field(description="The same in words; empty if unknown.")
    colors: str = Field(description="The scale of the shades, in words.")
    words: list[Word]
    unknown: list[str] = Field(description="Words that the model does not know; left out.")
    specials: list[Word]
    boxes: list[tuple[float, float, float, float]] | None
    grid: Grid | None = Field(description="The grid of the boxes; null if they are no grid.")
    scale: Scale | None


class CorrectRequest(RequestBody):
    image: ImageId
    text: Sentence
    model: ModelName = None
    threshold: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)


class Suspect(BaseModel):
    word: str
    span: tuple[int, int]
    wrong: float
    suggestions: list[str]
    known: bool = True


class Change(BaseModel):
    index: int = Field(alias="place", description="Index of the word among the words.")
    word: str
    instead: str
    score: float


class Agreed(BaseModel):
    """Changes that the matcher agrees with, the best first; scores are the matcher's."""

    text: str
    score: float
    changes: list[Change]


class CorrectResponse(BaseModel):
    """Wrong words and their corrections; scores are the corrector's.

    ``agreed`` has the changes that also raise the score of the served matcher.
    """

    image: str
    text: str
    threshold: float
    score: float
    corrected: str
    corrected_score: float
    words: list[Suspect]
    changes: list[Change]
    refused: list[Change]
    agreed: Agreed


class ImageInfo(BaseModel):
    id: str
    captions: list[str]


class Images(BaseModel):
    """One page of the images of the index."""

    total: int
    offset: int
    images: list[ImageInfo]


class Uploaded(BaseModel):
    """The id of an upload, for other requests while the upload is in memory."""

    id: str
    width: int
    height: int


class ModelInfo(BaseModel):
    """A served model."""

    name: str = Field(description="The name that requests use.")
    kind: str = Field(description="The kind of model, for example naaf.")
    summary: str = Field(description="What the model was trained for; empty if unknown.")
    corrector: str | None = Field(description="The kind of model that corrects for it, if any.")
    can_upload: bool = Field(description="Whether it reads pixels, so also those of uploads.")
    scale: Scale | None


class About(BaseModel):
    """The served content."""

    version: str
    models: list[ModelInfo] = Field(description="The first is used unless a request names one.")
    missing: list[str] = Field(description="Models that are not served, each with the reason.")
    search_model: str | None = Field(description="The model that searches; null: no library.")
    images: int
    captions: int
    can_upload: bool
    examples: list[str] = Field(description="Short captions of the library, to try a search with.")
    audit: bool
    audit_awaited: bool = Field(description="Whether the audit is still being made.")
    audit_problem: str = Field(description="Why the awaited audit could not be made; else empty.")
    runs: int
    limits: dict[str, float]


class ReasonCount(BaseModel):
    sign: str
    name: str
    count: int


class DecisionInfo(BaseModel):
    """What a reviewer decided."""

    action: Literal["keep", "fix", "discard"]
    correction: str | None
    reviewer: str
    time: datetime


class ReviewCounts(BaseModel):
    """Numbers of findings by decision.

    ``conflicts`` are open findings with different decisions, ``unknown`` decisions on captions that
    are not in this audit, ``damaged`` lines that could not be read.
    """

    findings: int
    open: int
    decided: int
    kept: int
    fixed: int
    discarded: int
    conflicts: int
    unknown: int
    damaged: int


def _line(text: str | None) -> str | None:
    return None if text is None else one_line(_unicode(text))


class DecisionRequest(RequestBody):
    """A decision on the finding with ``key``; only a fix has a ``correction``."""

    key: str = Field(min_length=1, max_length=ID_LETTERS)
    action: Action
    correction: Annotated[
        str | None, Field(min_length=1, max_length=CORRECTION_CHARS), AfterValidator(_line)
    ] = None
    reviewer: Annotated[
        str, Field(min_length=1, max_length=REVIEWER_CHARS), AfterValidator(_line)
    ] = ANONYMOUS

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        if (self.action == "fix") != (self.correction is not None):
            raise ValueError("give a correction with the action fix, and only with it")
        return self


class DecisionResponse(BaseModel):
    """What stands after a decision: it, merged ones that differ, and the counts."""

    key: str
    decision: DecisionInfo | None
    rivals: list[DecisionInfo]
    review: ReviewCounts


class ExportResponse(Exported):
    """A corrected copy of the data; ``files`` are names for /api/audit/corrected."""

    folder: str


class AuditEntry(Finding):
    """A finding, or several with the same caption.

    ``key`` names it in decisions. ``decision`` stands; ``rivals`` are merged ones that differ.
    ``image_names`` maps ids of the audited data to names in this service, as the index may contain
    other data. ``same`` counts the findings with this caption, ``same_images`` names the first of
    their images, ``more_images`` counts the rest.
    """

    key: str
    decision: DecisionInfo | None
    rivals: list[DecisionInfo]
    image_names: dict[str, str]
    same: int
    same_images: list[str]
    more_images: int


class Findings(BaseModel):
    """Findings of `counterfoil audit`: suspicious captions, worst first, or near-duplicates.

    ``total`` counts the entries of this list, ``counts`` the captions of each section, ``left`` the
    entries behind these.
    """

    section: Section
    state: State
    total: int
    left: int
    review: ReviewCounts
    offset: int
    counts: dict[Section, int]
    reasons: list[ReasonCount]
    notes: list[str] = []
    model: str = Field("", description="Name of the run that made the audit; empty if unknown.")
    findings: list[AuditEntry]


class RunSummary(BaseModel):
    name: str
    model: str
    objective: str
    data: str
    rsum: float | None
    finished: bool = Field(description="Whether there are test results.")
    training: bool = Field(description="Whether a process is writing the run now.")


class RunList(BaseModel):
    runs: list[RunSummary]


class Series(BaseModel):
    name: str
    points: list[tuple[float, float]]


class PlotData(BaseModel):
    name: str
    title: str
    x: str
    y: str
    series: list[Series]


class RunDetail(RunSummary):
    """A run with its results, its configuration and its curves."""

    results: dict[str, Any]
    config: str
    plots: list[PlotData]
    warnings: list[str]
    epochs_done: int = Field(description="Finished epochs.")
    epochs: int | None = Field(description="Epochs in its configuration; null if unreadable.")


class SessionRequest(RequestBody):
    """The token of the service, chosen or printed when it started."""

    token: str = Field(min_length=1, max_length=ID_LETTERS)


class Health(BaseModel):
    status: Literal["ok"]
    waiting: int
