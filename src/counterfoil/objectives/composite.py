"""Several objectives at once, each with a weight and a range of epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from counterfoil.errors import ConfigError
from counterfoil.objectives.base import Context, LossReport, Objective, objectives


class Composite(Objective):
    """Weighted sum of objectives; a term outside its range of epochs contributes nothing."""

    def __init__(
        self,
        terms: Mapping[str, Objective],
        weights: Mapping[str, float],
        epochs: Mapping[str, tuple[int, int | None]],
    ) -> None:
        super().__init__()
        self.terms = nn.ModuleDict(terms)
        self.weights, self.epochs = dict(weights), dict(epochs)

    def forward(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        total = scores.new_zeros(())
        diagnostics: dict[str, Tensor] = {}
        for name, term in self.terms.items():
            first, last = self.epochs[name]
            if context.epoch < first or (last is not None and context.epoch >= last):
                continue
            report: LossReport = term(scores, positives, context)
            total = total + self.weights[name] * report.loss
            diagnostics |= report.diagnostics
            if len(self.terms) > 1:
                diagnostics[f"loss/{name}"] = report.loss.detach()
        return LossReport(total, diagnostics)


def create_objective(spec: str | Mapping[str, Any]) -> Composite:
    """Build an objective from its configuration.

    A name (``"hardest"``), weights (``{"hardest": 1.0, "triplet": 0.1}``), or options per term
    (``{"hardest": {"weight": 1, "epochs": [1, None], "margin": 0.3}}``; epochs count from 0, the
    end is not included).
    """
    terms: dict[str, Objective] = {}
    weights: dict[str, float] = {}
    epochs: dict[str, tuple[int, int | None]] = {}
    table = {spec: {}} if isinstance(spec, str) else dict(spec)
    if not table:
        raise ConfigError("objective: name at least one (triplet, hardest, …)")
    for name, given in table.items():
        where = f"objective.{name}"
        if given is not None and not isinstance(given, (int, float, Mapping)):
            raise ConfigError(f"{where}: expected a weight or options, got {given!r}")
        options = dict(given or {}) if not isinstance(given, (int, float)) else {"weight": given}
        weights[name] = _number(options.pop("weight", 1.0), f"{where}.weight")
        epochs[name] = _epoch_range(options.pop("epochs", None), f"{where}.epochs")
        terms[name] = objectives.create(name, options, where=where)
    return Composite(terms, weights, epochs)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: expected a number, got {value!r}")
    return float(value)


def _epoch_range(value: Any, where: str) -> tuple[int, int | None]:
    if value is None:
        return 0, None
    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and type(value[0]) is int
        and (value[1] is None or (type(value[1]) is int and value[1] > value[0]))
    ):
        return value[0], value[1]
    raise ConfigError(f"{where}: expected [first, end] with end after first or null, got {value!r}")
