"""`CollapseWatch`: notices a run whose embeddings have all become one, and says what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from counterfoil.objectives.base import Manner

CAUSE = {
    "hardest": (
        "The hardest negative is chosen while every similarity is equal: it lies where the "
        "positive lies, so the gradient vanishes (SelHN, section 3.2)."
    ),
    "every": "Every embedding has come to lie at one point, where the gradient vanishes.",
}

REMEDIES = {
    "hardest": (
        "use objective=selhn; or let the first epoch count every negative with "
        "objective.hardest.warmup_epochs=1; or lower train.optimiser.lr"
    ),
    "selective": (
        "lower train.optimiser.lr; or raise objective.selhn.epsilon, so that more anchors count "
        "every negative; or give it more negatives with a larger train.batch_size"
    ),
    "every": (
        "lower train.optimiser.lr; or look whether images and captions really differ with: "
        "counterfoil data inspect"
    ),
}


@dataclass
class _State:
    """How long the run has been in or out of collapse, and what was said about it."""

    collapsed: bool = False  # what the last text said
    streak: int = 0  # judged updates in a row that contradict it
    since: int = 0  # the step at which that streak began
    gap: float | None = None  # the last mean |Δs| that was given


class CollapseWatch:
    """Warns once when training has collapsed, and once when it has recovered.

    An update counts as collapsed when the loss is within ``loss_tolerance`` (relative) of the
    uninformed value, the one it has when all scores are equal, and the mean |Δs| is below
    ``gap_limit``. It takes ``patience`` such updates in a row to warn and as many others in a row
    to call it over, so neither a noisy batch nor a short plateau after the start is reported.
    Where every negative counts (`triplet`) or does near ties (`selhn`), the gradient leads out of
    such a plateau by itself, usually within 200 updates: there a warning takes ``slower`` times the
    patience.

    Why both: a run that learns crosses the uninformed loss when as many anchors win as lose, but
    then |Δs| is near 0.1; and |Δs| alone depends on how the matcher scales its scores. In a
    collapsed run of a hinge on the hardest negative nearly every Δs is negative, so the loss is
    (1 + |Δs| / margin) times the uninformed one: with a margin of 0.2 the default of 10 % asks for
    the same |Δs| < 0.02 as the limit does (collapsed runs go from 0.015 down to 0.0003 and below).
    """

    def __init__(
        self,
        *,
        patience: int = 50,
        slower: int = 5,
        loss_tolerance: float = 0.1,
        gap_limit: float = 0.02,
    ) -> None:
        self.patience, self.slower = patience, slower
        self.loss_tolerance, self.gap_limit = loss_tolerance, gap_limit
        self._state = _State()

    def update(
        self, step: int, loss: float, uninformed: float | None, gap: float | None, manner: Manner
    ) -> str | None:
        """Take in one update; a text where there is something to say.

        ``gap`` is the mean |Δs|; where it was not measured in this update, the last one holds. An
        update without an uninformed loss, or before the first gap, cannot be judged and counts for
        neither side. ``manner`` says which negatives the objective counts while scores are equal.
        """
        state = self._state
        state.gap = state.gap if gap is None else gap
        if uninformed is None or state.gap is None:
            return None
        near = abs(loss - uninformed) <= self.loss_tolerance * abs(uninformed)
        if (near and state.gap < self.gap_limit) == state.collapsed:
            state.streak = 0
            return None
        if state.streak == 0:
            state.since = step
        state.streak += 1
        slowly = not state.collapsed and manner != "hardest"
        if state.streak < self.patience * (self.slower if slowly else 1):
            return None
        state.collapsed, state.streak = not state.collapsed, 0
        if state.collapsed:
            return self._warning(loss, uninformed, state.gap, manner)
        return f"recovered at step {state.since}: the scores tell pairs apart again"

    def _warning(self, loss: float, uninformed: float, gap: float, manner: Manner) -> str:
        cause = CAUSE["every" if manner == "every" else "hardest"]
        return (
            f"training has collapsed: since step {self._state.since} the loss ({loss:.4g}) is that "
            f"of a model that gives every pair the same score ({uninformed:.4g}), and positives "
            f"differ from their hardest negatives by {gap:.2g} on average. {cause} "
            f"What helps: {REMEDIES[manner]}."
        )

    def state_dict(self) -> dict[str, bool | int | float | None]:
        """Plain values, so that a resumed run neither warns twice nor counts anew."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, bool | int | float | None]) -> None:
        self._state = _State(**state)  # type: ignore[arg-type]
