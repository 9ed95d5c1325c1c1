"""`CollapseWatch`: detects collapsed embeddings during training, and suggests remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from counterfoil.data.batches.collate import PairBatch
from counterfoil.objectives.base import NegativeSelection
from counterfoil.training.checkpoint import Position
from counterfoil.training.step import TrainingStep, anchors_and_negatives

CAUSES = {
    "hardest": (
        "The hardest negative is chosen while all similarities are equal, so it coincides with "
        "the positive and the gradient vanishes (SelHN, section 3.2)."
    ),
    "all": "All embeddings are at one point, where the gradient vanishes.",
}

LOWER_RATE_ADVICE = "lower train.optimizer.lr"


def remedies(negative_selection: NegativeSelection, objective: Mapping[str, Any]) -> str:
    """Remedies for a collapsed run, without those that its objective already has."""
    offered = [LOWER_RATE_ADVICE]
    if negative_selection == "hardest":
        if _lacks_warmup(objective):
            offered.insert(
                0,
                "let the first epoch count every negative with objective.hardest.warmup_epochs=1",
            )
        if "selhn" not in objective:
            offered.insert(0, "use objective=selhn")
    elif negative_selection == "adaptive":
        if "selhn" in objective:
            offered.append(
                "raise objective.selhn.epsilon, so that more anchors count every negative"
            )
        offered.append("give it more negatives with a larger train.batch_size")
    else:
        offered.append("check that images and captions differ with: counterfoil data inspect")
    return "; or ".join(offered)


def _lacks_warmup(objective: Mapping[str, Any]) -> bool:
    """Whether the objective has the term ``hardest`` without warm-up epochs."""
    options = objective.get("hardest", 0)
    return "hardest" in objective and not (
        isinstance(options, Mapping) and options.get("warmup_epochs")
    )


@dataclass
class _State:
    """Whether the run is collapsed, and the streak of updates that contradict it."""

    collapsed: bool = False  # as last reported
    streak: int = 0  # consecutive updates that contradict it
    since: int = 0  # first step of the streak
    gap: float | None = None  # last measured mean |Δs|
    separation: float | None = None  # last measured share of negatives below their positive


class CollapseWatch:
    """Warns once when training has collapsed, and once when it has recovered.

    An update counts as collapsed if three conditions hold:

    - The loss is within ``loss_tolerance`` (relative) of its value at equal scores.
    - The mean |Δs| is below ``gap_limit``.
    - Fewer than ``separated`` of the negatives score below the positive of their anchor (one half
      by chance), or |Δs| is below a tenth of the limit.

    ``patience`` such updates in a row cause a warning, and as many others end it, so noisy batches
    and short plateaus are not reported. If all negatives count (`triplet`), or do so near ties
    (`selhn`), the gradient leaves a plateau within about 200 updates, so a warning takes ``slower``
    times the patience.

    The loss alone is not enough: a run that learns crosses this value when as many anchors win as
    lose. Loss and gap depend on the margin, and a matcher whose scores grow slowly (NAAF) stays
    below it for an epoch while its ranking improves. The share of negatives has no scale: it was
    0.6 to 0.7 in collapsed runs and above 0.9 in those. The tenth covers a run that shrinks to a
    point with its ranking half intact. In a collapsed run of a hinge on the hardest negative nearly
    every Δs is negative, so the loss is (1 + |Δs| / margin) times that at equal scores: with a
    margin of 0.2, 10 % corresponds to |Δs| < 0.02 (collapsed runs have 0.015 to below 0.0003).

    ``objective`` is that of the run, as configured: remedies that it already has are not suggested.
    ``batch_size`` is the number of pairs per batch, until negatives of a batch are counted.
    """

    def __init__(
        self,
        objective: Mapping[str, Any],
        batch_size: int = 2,
        *,
        patience: int = 50,
        slower: int = 5,
        loss_tolerance: float = 0.1,
        gap_limit: float = 0.02,
        separated: float = 0.8,
    ) -> None:
        self.patience, self.slower = patience, slower
        self.loss_tolerance, self.gap_limit = loss_tolerance, gap_limit
        self.separated = separated
        self.objective = objective
        self.anchor_counts = (batch_size, float(batch_size - 1))
        self._state = _State()

    def judge(
        self,
        step: TrainingStep,
        batch: PairBatch,
        position: Position,
        loss: float,
        numbers: Mapping[str, float | None],
    ) -> str | None:
        """`update` with the diagnostics of a step, which may be empty."""
        gap, epoch = numbers.get("gap/abs"), position.epoch
        if gap is not None:  # the number of negatives hardly varies between batches
            self.anchor_counts = anchors_and_negatives(batch, step.twins)
        expected = step.objective.loss_at_equal_scores(*self.anchor_counts, epoch)
        negative_selection, separated = (
            step.objective.negative_selection(epoch),
            numbers.get("separation"),
        )
        return self.update(position.step, loss, expected, gap, negative_selection, separated)

    def update(
        self,
        step: int,
        loss: float,
        loss_at_equal_scores: float | None,
        gap: float | None,
        negative_selection: NegativeSelection,
        separation: float | None = None,
    ) -> str | None:
        """Judge one update; returns a message when the run collapses or recovers.

        ``gap`` is the mean |Δs|, ``separation`` the share of negatives below their positive; if
        one is None, its last value is used. Without any ``separation``, loss and gap decide.
        Updates without ``loss_at_equal_scores``, or before the first gap, are ignored.
        ``negative_selection`` says which negatives the objective uses at equal scores.
        """
        state = self._state
        state.gap = state.gap if gap is None else gap
        state.separation = state.separation if separation is None else separation
        if loss_at_equal_scores is None or state.gap is None:
            return None
        if self._signs(loss, loss_at_equal_scores, state.gap) == state.collapsed:
            state.streak = 0
            return None
        if state.streak == 0:
            state.since = step
        state.streak += 1
        slowly = not state.collapsed and negative_selection != "hardest"
        if state.streak < self.patience * (self.slower if slowly else 1):
            return None
        state.collapsed, state.streak = not state.collapsed, 0
        if state.collapsed:
            return self._warning(loss, loss_at_equal_scores, state.gap, negative_selection)
        return f"recovered at step {state.since}: the scores tell pairs apart again"

    def _signs(self, loss: float, loss_at_equal_scores: float, gap: float) -> bool:
        """Whether an update looks collapsed."""
        near = abs(loss - loss_at_equal_scores) <= self.loss_tolerance * abs(loss_at_equal_scores)
        separation = self._state.separation
        mixed = separation is None or separation < self.separated
        return near and gap < (self.gap_limit if mixed else self.gap_limit / 10)

    def _warning(
        self,
        loss: float,
        loss_at_equal_scores: float,
        gap: float,
        negative_selection: NegativeSelection,
    ) -> str:
        cause = CAUSES["all" if negative_selection == "all" else "hardest"]
        return (
            f"training has collapsed: since step {self._state.since} the loss ({loss:.4g}) is that "
            f"of a model that gives every pair the same score ({loss_at_equal_scores:.4g}), and "
            f"positives differ from their hardest negatives by {gap:.2g} on average. {cause} "
            f"What may help: {remedies(negative_selection, self.objective)}."
        )

    def state_dict(self) -> dict[str, bool | int | float | None]:
        """Plain values, so that a resumed run continues its counts and warns once."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, bool | int | float | None]) -> None:
        self._state = _State(**state)  # type: ignore[arg-type]
