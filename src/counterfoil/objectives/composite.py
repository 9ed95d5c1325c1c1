"""Weighted sums of objectives, each with a range of epochs, built from a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import MAX_NUMBER
from counterfoil.data.batches.dataset import ExtraNegativeSource
from counterfoil.encoders.encoded import Needs
from counterfoil.objectives.base import (
    Context,
    LossReport,
    NegativeSelection,
    Objective,
    objectives,
)
from counterfoil.objectives.protection import Protection, protections
from counterfoil.objectives.services import Lookahead, RunSetup, TrainSplitScores

PROTECT = "protect"

PREFERRED_SELECTIONS: tuple[NegativeSelection, ...] = ("adaptive", "all")


class Composite(Objective):
    """Weighted sum of objectives; a term outside its range of epochs contributes nothing."""

    def __init__(
        self,
        terms: Mapping[str, Objective],
        weights: Mapping[str, float],
        epochs: Mapping[str, tuple[int, int | None]],
        protection: Protection | None = None,
    ) -> None:
        super().__init__()
        self.terms = nn.ModuleDict(terms)
        self.weights, self.epochs = dict(weights), dict(epochs)
        self.protection = protection
        self.requires = "; ".join(
            f"{term.requires} ({name})" for name, term in terms.items() if term.requires
        )
        self.needs_scores = any(term.needs_scores for term in terms.values())
        self.ensemble_size = max(term.ensemble_size for term in terms.values())
        self.held_out = max(term.held_out for term in terms.values())
        self.needs = _union([term.needs for term in terms.values()])

    def __repr__(self) -> str:
        """The terms with their weights, unless these are 1."""
        terms = (
            f"{term!r}" if self.weights[name] == 1.0 else f"{self.weights[name]:g} * {term!r}"
            for name, term in self.terms.items()
        )
        return f"Composite({' + '.join(terms)})"

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        parts: list[Tensor] = []
        diagnostics: dict[str, Tensor] = {}
        extras = context.services.batch.extras if context.services is not None else {}
        if self.protection is not None and self.protection.is_heuristic:
            protected: Tensor = self.protection(positives, context)
            if context.protected is not None:
                protected = protected | context.protected
            context = replace(context, protected=protected)
        if context.protected is not None and context.logging:
            diagnostics["protected"] = context.protected.float().mean()
        for name, term in self.active(context.epoch):
            report = term.checked_report(
                scores, positives, replace(context, extra=extras.get(name))
            )
            weight = self.weights[name]
            parts.append(report.loss if weight == 1.0 else weight * report.loss)
            diagnostics |= report.diagnostics
            if len(self.terms) > 1:
                diagnostics[f"loss/{name}"] = report.loss.detach()
        # an empty sum is 0 with a gradient, even for a matrix of NaN
        total = sum(parts[1:], parts[0]) if parts else scores[:0].sum()
        return LossReport(total, diagnostics, context.protected)

    @property
    def protects_identical(self) -> bool:
        """Whether identical captions are excluded from the negatives (the default)."""
        return self.protection is None or self.protection.identical

    def active(self, epoch: int) -> Iterator[tuple[str, Objective]]:
        """The terms whose range of epochs includes this one."""
        for name, term in self.each():
            first, last = self.epochs[name]
            if first <= epoch and (last is None or epoch < last):
                yield name, term

    def each(self) -> Iterator[tuple[str, Objective]]:
        for name, term in self.terms.items():
            assert isinstance(term, Objective)  # noqa: S101 - nn.ModuleDict erases the type
            yield name, term

    def prepare(self, training: RunSetup) -> None:
        for _, term in self.each():
            term.prepare(training)
        if self.protection is not None:
            self.protection.prepare(training)

    def extra_sources_by_term(self) -> dict[str, ExtraNegativeSource]:
        sources = {name: term.extra_negatives() for name, term in self.each()}
        return {name: source for name, source in sources.items() if source is not None}

    def begin_epoch(self, epoch: int, survey: TrainSplitScores) -> None:
        for _, term in self.active(epoch):
            term.begin_epoch(epoch, survey)

    def before_step(self, trial: Lookahead, epoch: int = 0) -> None:
        for _, term in self.active(epoch):
            term.before_step(trial)

    def negative_selection(self, epoch: int) -> NegativeSelection:
        """That of a term whose gradient does not vanish at equal scores, if there is one."""
        selections = {term.negative_selection(epoch) for _, term in self.active(epoch)}
        return next((m for m in PREFERRED_SELECTIONS if m in selections), "hardest")

    def hinge_margin(self, epoch: int) -> float | None:
        """The margin of the active term with the largest weight (of ties: the larger margin)."""
        margins = [
            (abs(self.weights[name]), margin)
            for name, term in self.active(epoch)
            if (margin := term.hinge_margin(epoch)) is not None
        ]
        return max(margins)[1] if margins else None

    def idle_epochs(self, epochs: int) -> list[int]:
        """Epochs of a run in which no term is active."""
        return [epoch for epoch in range(epochs) if not any(True for _ in self.active(epoch))]

    def never_reached(self, epochs: int, steps_per_epoch: int) -> list[str]:
        """The warnings of all terms, each with its key, and terms that begin after the run."""
        warnings = []
        for name, term in self.each():
            first, last = self.epochs[name]
            end = epochs if last is None else min(last, epochs)
            if first >= epochs:
                reasons = [f"epochs=[{first}, {'null' if last is None else last}]: never active"]
            else:
                reasons = term.never_reached(end, steps_per_epoch)
            warnings += [f"objective.{name}.{reason}" for reason in reasons]
        return warnings

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        if not any(True for _ in self.active(epoch)):
            return None
        total = 0.0
        for name, term in self.active(epoch):
            value = term.loss_at_equal_scores(anchors, negatives, epoch)
            if value is None:
                return None
            total += self.weights[name] * value
        return total


def create_objective(spec: str | Mapping[str, Any]) -> Composite:
    """Build an objective from its configuration.

    A name (``"hardest"``), weights (``{"hardest": 1.0, "triplet": 0.1}``), or options per term
    (``{"hardest": {"weight": 1, "epochs": [1, None], "margin": 0.3}}``; epochs count from 0, the
    end is exclusive). The key ``protect`` is not a term: it configures `Protection`.
    """
    terms: dict[str, Objective] = {}
    weights: dict[str, float] = {}
    epochs: dict[str, tuple[int, int | None]] = {}
    if not isinstance(spec, (str, Mapping)):
        raise ConfigError(
            "objective: expected a name such as 'hardest', or a mapping of names to weights or "
            f"options, got {spec!r}"
        )
    table = {spec: {}} if isinstance(spec, str) else dict(spec)
    protection = _protection(table.pop(PROTECT)) if PROTECT in table else None
    if not table:
        raise ConfigError("objective: name at least one (triplet, hardest, …)")
    for name, given in table.items():
        where = f"objective.{name}"
        if given is not None and not isinstance(given, (int, float, Mapping)):
            raise ConfigError(f"{where}: expected a weight or options, got {given!r}")
        options = dict(given or {}) if not isinstance(given, (int, float)) else {"weight": given}
        weights[name] = _weight(options.pop("weight", 1.0), f"{where}.weight")
        epochs[name] = _epoch_range(options.pop("epochs", None), f"{where}.epochs")
        terms[name] = objectives.create(name, options, where=where)
    if not any(weights.values()):
        raise ConfigError("objective: all weights are 0, so nothing would be learned")
    return Composite(terms, weights, epochs, protection)


def _protection(given: Any) -> Protection:
    if not isinstance(given, Mapping):
        raise ConfigError(f"objective.{PROTECT}: expected options, got {given!r}")
    protection: Protection = protections.create(PROTECT, given, where=f"objective.{PROTECT}")
    return protection


def _union(needs: list[Needs | None]) -> Needs | None:
    distinct = {need for need in needs if need is not None}
    if len(distinct) > 1:
        return "both"
    return distinct.pop() if distinct else None


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: expected a number, got {value!r}")
    if not abs(value) <= MAX_NUMBER:  # nan is not, either
        raise ConfigError(f"{where}: expected a finite number, got {value!r}")
    return float(value)


def _weight(value: Any, where: str) -> float:
    weight = _number(value, where)
    if weight < 0:
        raise ConfigError(f"{where}: expected 0 or more, got {value!r}: it would train against it")
    return weight


def _epoch_range(value: Any, where: str) -> tuple[int, int | None]:
    if value is None:
        return 0, None
    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and type(value[0]) is int
        and value[0] >= 0
        and (value[1] is None or (type(value[1]) is int and value[1] > value[0]))
    ):
        return value[0], value[1]
    raise ConfigError(f"{where}: expected [first, end] with end after first or null, got {value!r}")
