"""Suggestions for the words of findings, by a model that was taught to correct (TAGS-DC)."""

from __future__ import annotations

from collections.abc import Sequence

from counterfoil.audit.findings import Corrected, Finding, WrongWord
from counterfoil.data.pairs import Split
from counterfoil.errors import DataError
from counterfoil.models.correct import Correction, correct, correcting
from counterfoil.models.model import Model
from counterfoil.models.word_spans import caption_words
from counterfoil.progress import Progress, Silent

NO_CORRECTOR = (
    "no corrections: this model was not taught to correct; name one that was (objective tags-dc) "
    "with --corrector"
)


class Corrector:
    """A model that corrects captions of one split.

    ``split`` has the same images as the one that is audited, with fragments of the model's kind.
    """

    def __init__(self, model: Model, split: Split, threshold: float | None = None) -> None:
        correcting(model)
        self.model, self.fragments, self.threshold = model, split.require_fragments(), threshold
        self.place = {name: number for number, name in enumerate(split.ids)}

    def correct_all(
        self, findings: Sequence[Finding], first: int, progress: Progress | None = None
    ) -> list[Finding]:
        """The findings, the first so many mismatches among them with corrections."""
        progress = progress or Silent()
        wrong = [number for number, one in enumerate(findings) if one.kind == "mismatch"]
        found = list(findings)
        for number in progress.track(wrong[:first], "correcting", min(first, len(wrong))):
            found[number] = self.correct(findings[number])
        for number in wrong[first:]:
            note = f"only the first {first} were corrected; --details corrects more"
            found[number] = findings[number].model_copy(update={"correction_note": note})
        return found

    def correct(self, finding: Finding) -> Finding:
        """A finding with its correction, or with a note that says why there is none."""
        if not caption_words(finding.text):
            return finding.model_copy(update={"correction_note": "the caption has no words"})
        image = self.place.get(finding.image)
        if image is None:
            note = "the corrector's data lack this image"
            return finding.model_copy(update={"correction_note": note})
        try:
            fragments = self.fragments.read(image)
        except DataError as error:
            return finding.model_copy(update={"correction_note": str(error)})
        correction = correct(self.model, fragments, finding.text, threshold=self.threshold)
        return _with_correction(finding, correction)


def _with_correction(finding: Finding, found: Correction) -> Finding:
    suggested = {word.span: word.suggestions for word in found.words}
    words: tuple[WrongWord, ...] = tuple(
        word.model_copy(update={"suggestions": suggested.get(word.span, ())})
        for word in finding.wrong_words
    )
    corrected = None
    if found.changes:
        corrected = Corrected(
            text=found.corrected,
            before=found.score,
            after=found.corrected_score,
            changes=tuple((change.word, change.instead) for change in found.changes),
        )
    note = "" if corrected else _no_change_note(found)
    update = {"wrong_words": words, "correction": corrected, "correction_note": note}
    return finding.model_copy(update=update)


def _no_change_note(correction: Correction) -> str:
    if not correction.rule.usable:
        return f"no suggestion: {correction.rule.obstacle()}"
    return "no suggestion: no word of the same part of speech raises the score enough"
