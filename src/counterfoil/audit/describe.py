"""Turn the numbers of an audit into findings: reasons, wrong words and corrections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from counterfoil.audit.findings import (
    SIGN_NAMES,
    Corrected,
    Finding,
    Kind,
    OtherCaption,
    OtherImage,
    Reason,
    UnknownWord,
    WrongWord,
    diverse_first,
)
from counterfoil.audit.survey import POOL_SIZE, SplitSurvey
from counterfoil.audit.suspicion import SIGNS, Values, WordEffects, named_signs
from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.data.duplicates import Duplicate, content
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import caption_words, is_content_word, without_punctuation
from counterfoil.evaluation.words.doubts import WordDoubts
from counterfoil.models.correct import Correction, correct, correction_matcher
from counterfoil.models.model import Model

NO_CORRECTOR = (
    "no corrections: this model was not taught to correct; name one that was (objective tags-dc) "
    "with --corrector"
)


@dataclass(frozen=True)
class Describer:
    """Makes findings from the data about a split's captions."""

    split: Split
    survey: SplitSurvey
    signs: Values
    suspicion: Values
    duplicates: dict[int, Duplicate]
    effects: WordEffects
    usual: WordDoubts
    doubts: dict[int, Values]
    word_threshold: float

    def findings(self, threshold: float) -> list[Finding]:
        """Captions of suspicion ``threshold`` or more, highest first, then near-duplicates."""
        captions = self.survey.captions
        own = self.survey.own[captions]
        quantiles = np.searchsorted(np.sort(own), own, side="left") / max(1, len(own))
        first = np.concatenate([[0], np.cumsum([len(texts) for texts in self.split.captions])])
        order = np.argsort(-self.suspicion[captions], kind="stable")
        wrong: list[Finding] = []
        duplicates: list[Finding] = []
        for index in order:
            number = int(captions[index])
            suspicious = self.suspicion[number] >= threshold
            if suspicious or number in self.duplicates:
                kind: Kind = "mismatch" if suspicious else "false-negative"
                position = number - int(first[self.split.image_of[number]])
                finding = self._finding(kind, number, position, float(quantiles[index]))
                (wrong if suspicious else duplicates).append(finding)
        return wrong + duplicates

    def _finding(self, kind: Kind, number: int, position: int, quantile: float) -> Finding:
        survey, split = self.survey, self.split
        score = float(survey.own[number])
        best = float(survey.other_score[number]) if survey.other[number] >= 0 else None
        words = self._wrong_words(number) if kind == "mismatch" else ()
        near = self.duplicates.get(number)
        return Finding(
            kind=kind,
            split=split.name,
            image=split.ids[int(split.image_of[number])],
            caption=position,
            text=writable(split.texts[number]),
            suspicion=float(self.suspicion[number]),
            score=score,
            quantile=quantile,
            rank=int(survey.rank[number]),
            compared=survey.compared,
            margin=None if best is None else score - best,
            reasons=self._reasons(number, kind, quantile, words),
            wrong_words=words,
            words_examined=number in self.effects.words,
            better_image=self._better_image(number),
            better_caption=self._better_caption(number) if kind == "mismatch" else None,
            near_duplicate=self._caption(near.caption, near.similarity) if near else None,
            near_duplicate_images=near.others if near else 0,
            unknown_words=self._unknown_words(number),
        )

    def _reasons(
        self, number: int, kind: Kind, quantile: float, words: tuple[WrongWord, ...]
    ) -> tuple[Reason, ...]:
        """The signs with enough evidence, or the strongest one; then a near-duplicate."""
        signs = self.signs[number]
        reasons = [
            Reason(
                sign=SIGNS[k],
                strength=float(signs[k]),
                text=self._sentence(SIGNS[k], number, quantile, words),
            )
            for k in (named_signs(signs) if kind == "mismatch" else ())
        ]
        near = self.duplicates.get(number)
        if near is not None:
            many = "1 other image has" if near.others == 1 else f"{near.others} other images have"
            text = f"{many} {SIGN_NAMES['near-duplicate'].removesuffix(' elsewhere')}"
            reasons.append(Reason(sign="near-duplicate", strength=near.similarity, text=text))
        return tuple(reasons)

    def _sentence(
        self, sign: str, number: int, quantile: float, words: tuple[WrongWord, ...]
    ) -> str:
        survey = self.survey
        if sign == "low-score":
            score = float(survey.own[number])
            return f"score {score:.3f}; {100 * quantile:.1f} % of the captions score lower"
        if sign == "other-image":
            above = int(survey.rank[number]) - 1
            return f"{above} of {survey.compared - 1} other images fit at least as well"
        if sign == "other-caption":
            pool = survey.pool_score[int(survey.image_of[number])]
            better = int((pool > survey.own[number]).sum())
            more = " or more" if better == POOL_SIZE else ""  # no others are stored
            fit = "caption of another image fits" if better == 1 else "captions of other images fit"
            return f"{better}{more} {fit} this image better"
        if sign == "neighbors":
            return "the captions of this image and of similar ones are unlike this caption"
        if not words:
            return "the caption as a whole fits less than usual; no single word stands out"
        weak = [word.word for word in words if word.effect < word.usual]
        # their effect is usual: only the language model put them in doubt
        unlikely = [word.word for word in words if word.effect >= word.usual]
        parts = []
        if weak:
            does = "does" if len(weak) == 1 else "do"
            parts.append(f"{_quoted(weak)} {does} less for the match than usual")
        if unlikely:
            be = "is" if len(unlikely) == 1 else "are"
            parts.append(f"{_quoted(unlikely)} {be} unlikely among the other words")
        return "; ".join(parts)

    def _wrong_words(self, number: int) -> tuple[WrongWord, ...]:
        """The words that are in doubt, in the order of the caption.

        None if all of them are function words: what is wrong is then the caption as a whole.
        """
        words = self.effects.words.get(number, [])
        if not words:
            return ()
        named = [
            word
            for word, doubt in zip(words, self.doubts[number], strict=True)
            if doubt > self.word_threshold
        ]
        if not any(is_content_word(word.word) for word in named):
            return ()
        return tuple(
            WrongWord(
                word=word.word,
                span=word.span,
                effect=word.effect,
                usual=self.usual.usual_effect(word.word),
            )
            for word in named
        )

    def _unknown_words(self, number: int) -> tuple[UnknownWord, ...]:
        read = self.survey.unknown.get(number)
        words = () if read is None else read.unknown
        return tuple(
            UnknownWord(word=writable(word.text), span=(word.start, word.end))
            for word in without_punctuation(words)
        )

    def _better_image(self, number: int) -> OtherImage | None:
        """The best other image that fits at least as well, and has no near-duplicate caption."""
        near = self.duplicates.get(number)
        rivals = zip(self.survey.rivals[number], self.survey.rival_score[number], strict=True)
        for image, score in rivals:
            if image < 0 or score < self.survey.own[number]:
                return None
            if near is None or int(image) not in near.images:
                return OtherImage(image=self.split.ids[int(image)], score=float(score))
        return None

    def _better_caption(self, number: int) -> OtherCaption | None:
        """The best caption of another image, or None if this caption scores higher.

        Captions that only repeat one of this image's captions are ignored.
        """
        image = int(self.split.image_of[number])
        own = {content(text) for text in self.split.captions[image]}
        pool = zip(self.survey.pool[image], self.survey.pool_score[image], strict=True)
        for caption, score in pool:
            if caption < 0 or score <= self.survey.own[number]:
                return None
            if content(self.split.texts[caption]) not in own:
                return self._caption(int(caption), float(score))
        return None

    def _caption(self, number: int, score: float) -> OtherCaption:
        image = self.split.ids[int(self.split.image_of[number])]
        return OtherCaption(text=writable(self.split.texts[number]), image=image, score=score)


def _quoted(words: Sequence[str]) -> str:
    return ", ".join(f"“{word}”" for word in words)


def writable(text: str) -> str:
    """Text that can be encoded: lone surrogates, which JSON may contain, become ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Corrector:
    """A model that corrects captions of one split.

    ``split`` has the images of the audited split, with fragments for this model.
    """

    def __init__(self, model: Model, split: Split, threshold: float | None = None) -> None:
        correction_matcher(model)
        self.model, self.fragments, self.threshold = model, model.fragments_of(split), threshold
        self.row_of = {name: number for number, name in enumerate(split.ids)}

    def correct_all(
        self, findings: Sequence[Finding], first: int, progress: Progress | None = None
    ) -> list[Finding]:
        """The findings, with corrections for the ``first`` mismatches of the list that is shown."""
        progress = progress or Silent()
        in_order = diverse_first([one for one in findings if one.kind == "mismatch"])
        corrected = {}
        for one in progress.track(in_order[:first], "correcting", min(first, len(in_order))):
            corrected[id(one)] = self.correct(one)
        note = f"only the first {first} were corrected; use --details for more"
        for one in in_order[first:]:
            corrected[id(one)] = one.model_copy(update={"correction_note": note})
        return [corrected.get(id(one), one) for one in findings]

    def correct(self, finding: Finding) -> Finding:
        """The finding with its correction, or with a note why there is none."""
        if not caption_words(finding.text):
            return finding.model_copy(update={"correction_note": "the caption has no words"})
        image = self.row_of.get(finding.image)
        if image is None:
            note = "the corrector's data do not contain this image"
            return finding.model_copy(update={"correction_note": note})
        try:
            fragments = self.fragments.read(image)
        except DataError as error:
            return finding.model_copy(update={"correction_note": str(error)})
        correction = correct(self.model, fragments, finding.text, threshold=self.threshold)
        return _with_correction(finding, correction)


def _with_correction(finding: Finding, correction: Correction) -> Finding:
    suggested = {word.span: word.suggestions for word in correction.words}
    words: tuple[WrongWord, ...] = tuple(
        word.model_copy(update={"suggestions": suggested.get(word.span, ())})
        for word in finding.wrong_words
    )
    corrected = None
    if correction.changes:
        corrected = Corrected(
            text=correction.corrected,
            before=correction.score,
            after=correction.corrected_score,
            changes=tuple((change.word, change.instead) for change in correction.changes),
        )
    note = "" if corrected else _no_change_note(correction)
    update = {"wrong_words": words, "correction": corrected, "correction_note": note}
    return finding.model_copy(update=update)


def _no_change_note(correction: Correction) -> str:
    if not correction.rule.usable:
        return f"no suggestion: {correction.rule.obstacle()}"
    return "no suggestion: no word of the same part of speech raises the score enough"
