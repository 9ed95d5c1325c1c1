"""`CollapseWatch`: notices a run whose embeddings have all become one, and says what to do."""

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
        "The hardest negative is chosen while every similarity is equal: it lies where the "
        "positive lies, so the gradient vanishes (SelHN, section 3.2)."
    ),
    "all": "Every embedding has come to lie at one point, where the gradient vanishes.",
}

LOWER_RATE_ADVICE = "lower train.optimizer.lr"


def remedies(negative_selection: NegativeSelection, objective: Mapping[str, Any]) -> str:
    """What may help a collapsed run, less what its objective (as configured) already has."""
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
        offered.append(
            "look whether images and captions really differ with: counterfoil data inspect"
        )
    return "; or ".join(offered)


def _lacks_warmup(objective: Mapping[str, Any]) -> bool:
    """Whether the objective has the term that knows warm-up epochs, and none are set."""
    options = objective.get("hardest", 0)
    return "hardest" in objective and not (
        isinstance(options, Mapping) and options.get("warmup_epochs")
    )


@dataclass
class _State:
    """How long the run has been in or out of collapse, and what was said about it."""

    collapsed: bool = False  # what the last text said
    streak: int = 0  # judged updates in a row that contradict it
    since: int = 0  # the step at which that streak began
    gap: float | None = None  # the last mean |Δs| that was given
    separation: float | None = None  # the last share of negatives below their positive


class CollapseWatch:
    """Warns once when training has collapsed, and once when it has recovered.

    An update counts as collapsed when the loss is within ``loss_tolerance`` (relative) of the
    uninformed value, the one it has when all scores are equal, the mean |Δs| is below
    ``gap_limit``, and pairs are not told apart: fewer than ``separated`` of the negatives score
    below the positive of their anchor (half of them do by chance), or |Δs| is below a tenth of the
    limit. It takes ``patience`` such updates in a row to warn and as many others in a row to call
    it over, so neither a noisy batch nor a short plateau after the start is reported.
    Where every negative counts (`triplet`) or does near ties (`selhn`), the gradient leads out of
    such a plateau by itself, usually within 200 updates: there a warning takes ``slower`` times the
    patience.

    Why loss and gap: a run that learns crosses the uninformed loss when as many anchors win as
    lose. Why the share of negatives: both are measured against the margin, and a matcher whose
    scores grow slowly (NAAF) stays below it for an epoch while it ranks ever better. That share
    knows no scale: it was 0.6 to 0.7 in collapsed runs and passed 0.9 in those. Why the tenth: a
    run that had learned something may shrink to a point with its ranking half intact. In a
    collapsed run of a hinge on the hardest negative nearly every Δs is negative, so the loss is
    (1 + |Δs| / margin) times the uninformed one: with a margin of 0.2 the default of 10 % asks for
    the same |Δs| < 0.02 as the limit does (collapsed runs go from 0.015 down to 0.0003 and below).

    ``objective`` is that of the run, as configured: a warning offers nothing that it already has.
    ``batch_size`` is the number of pairs per batch; negatives are counted once a batch is measured.
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
        """As `update`, from the diagnostics of a step, which are empty if nothing was measured."""
        gap, epoch = numbers.get("gap/abs"), position.epoch
        if gap is not None:  # batches hardly differ in how many negatives they have
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
        """Take in one update; a text where there is something to say.

        ``gap`` is the mean |Δs| and ``separation`` the share of negatives below their positive;
        where one was not measured in this update, the last one holds. A run of which the share was
        never measured is judged by loss and gap. An update without an uninformed loss, or before
        the first gap, cannot be judged and counts for neither side. ``negative_selection`` says
        which negatives the objective counts while scores are equal.
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
        """Plain values, so that a resumed run neither warns twice nor counts anew."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, bool | int | float | None]) -> None:
        self._state = _State(**state)  # type: ignore[arg-type]
