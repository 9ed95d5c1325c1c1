"""Which words of a caption are wrong for an image, and what they should be (TAGS-DC).

The head ``discrimination`` finds the words and ``correction`` proposes others. A proposal becomes a
suggestion if it is of the same part of speech as the word it replaces, and if it raises the
matching score by more than a margin. `CorrectionRule` holds that margin; it is chosen on dev.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.tokenizers import (
    HuggingFaceText,
    TextProcessor,
    WordText,
    known_text,
    words_of_tokens,
)
from counterfoil.data.text.words import CaptionWord, caption_words
from counterfoil.data.text.words import words as tokens_of
from counterfoil.encoders import Encoded
from counterfoil.foils.generation import MaskTokens
from counterfoil.foils.grammar import keeps_word_class
from counterfoil.foils.rules import article_before, in_case_of
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models.correction_rule import CorrectionRule, Proposal, choose_change
from counterfoil.models.foil_generator import word_table

if TYPE_CHECKING:
    from counterfoil.models.model import Model


HEADS = ("discrimination", "correction")
PIECE = "##"
SCORE_BATCH = 512
CANDIDATES_READ = 8
"""Likeliest tokens read for each candidate wanted: many are of another word class."""
MIN_TOKENS_READ = 40
"""Tokens read at least: a rule of few candidates finds the same ones as one of more."""


def can_correct(model: Model) -> bool:
    """Whether a model has the heads that find wrong words and write others in their place."""
    matcher = model.matcher
    return isinstance(matcher, CrossEncoder) and all(head in matcher.heads for head in HEADS)


def correcting(model: Model) -> CrossEncoder:
    """The matcher of a model that can correct; any other model is refused."""
    matcher = model.matcher
    if not isinstance(matcher, CrossEncoder) or not can_correct(model):
        raise ConfigError(
            f"the model '{model.spec.name}' was not taught to correct: train one with the "
            "objective tags-dc (recipe scenes/tags-dc)"
        )
    return matcher


@dataclass(frozen=True)
class SuspectWord:
    """A word, how likely it is wrong, and the words suggested in its place, likeliest first.

    Only a word at least as likely wrong as the rule's threshold has suggestions, and only such as
    keep its part of speech and raise the score by more than the rule's margin. A word that the
    model does not know is left out, so nothing is said of it.
    """

    word: str
    span: tuple[int, int]
    wrong: float
    suggestions: tuple[str, ...]
    known: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {
            "word": self.word,
            "span": list(self.span),
            "wrong": self.wrong,
            "suggestions": list(self.suggestions),
            "known": self.known,
        }


@dataclass(frozen=True)
class Change:
    """A word of the caption, by its place among these, exchanged for another."""

    place: int
    word: str
    instead: str
    score: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "word": self.word,
            "instead": self.instead,
            "score": self.score,
        }


@dataclass(frozen=True)
class Correction:
    """A caption, its words, and the sentence that should stand there.

    ``corrected`` never scores below ``text``: it is the same if no change helps. ``changes`` are
    those made, each with the score after it. ``refused`` are the best candidates for words that are
    likely wrong, but whose change would not raise the score by enough; none if the ``rule`` allows
    no change at all.
    """

    text: str
    score: float
    corrected: str
    corrected_score: float
    words: tuple[SuspectWord, ...]
    changes: tuple[Change, ...]
    refused: tuple[Change, ...]
    rule: CorrectionRule = field(default_factory=CorrectionRule)

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {
            "text": self.text,
            "score": self.score,
            "corrected": self.corrected,
            "corrected_score": self.corrected_score,
            "words": [word.as_dict() for word in self.words],
            "changes": [change.as_dict() for change in self.changes],
            "refused": [change.as_dict() for change in self.refused],
            "rule": asdict(self.rule),
        }


@torch.inference_mode()
def correct(
    model: Model,
    image: Fragments,
    caption: str,
    *,
    threshold: float | None = None,
    margin: float | None = None,
    candidates: int | None = None,
) -> Correction:
    """Find the wrong words of a caption of an image, given as fragments, and correct them.

    The word most likely wrong comes first; after a change, the whole sentence is read again.
    ``threshold``, ``margin`` and ``candidates`` default to those of the model's own rule.
    """
    rule = rule_of(model, threshold, margin, candidates)
    return correct_batch(model, [image], [caption], rule)[0]


@torch.inference_mode()
def correct_batch(
    model: Model, images: Sequence[Fragments], captions: Sequence[str], rule: CorrectionRule
) -> list[Correction]:
    """Correct a caption of each image, all at once; as `correct` does one by one."""
    if not all(caption_words(caption) for caption in captions):
        raise DataError("the caption has no words: there is nothing to correct")
    with eval_mode(model):
        reader = CaptionReader(model, images, rule.candidates)
        return _correct_all(reader, captions, rule)


def rule_of(
    model: Model,
    threshold: float | None = None,
    margin: float | None = None,
    candidates: int | None = None,
) -> CorrectionRule:
    """The rule of a model, with what is asked for in its place.

    To ask for a margin allows changes, whatever was measured.
    """
    rule = model.correction_rule or CorrectionRule()
    asked = {"threshold": threshold, "margin": margin, "candidates": candidates}
    changed = {name: value for name, value in asked.items() if value is not None}
    if margin is not None:
        rule = replace(rule, usable=True)
    other = replace(rule, **changed)  # type: ignore[arg-type]
    return rule if other == rule else replace(other, precision=None, made=None)


def _correct_all(
    reader: CaptionReader, captions: Sequence[str], rule: CorrectionRule
) -> list[Correction]:
    """Rounds of at most one change per caption; only changed captions are read again."""
    read = reader.read(range(len(captions)), captions, rule.threshold)
    drafts = [_Draft(one, one.text) for one in read]
    open_rows = list(range(len(captions)))
    while open_rows:
        open_rows = [
            row for row, one in zip(open_rows, read, strict=True) if drafts[row].change(one, rule)
        ]
        texts = [drafts[row].text for row in open_rows]
        read = reader.read(open_rows, texts, rule.threshold) if open_rows else []
    return [draft.finished(rule) for draft in drafts]


@dataclass
class _Draft:
    """A caption on its way to a correction."""

    first: ReadCaption
    text: str
    score: float = 0.0
    changes: list[Change] = field(default_factory=list)
    refused: tuple[Change, ...] = ()

    def change(self, read: ReadCaption, rule: CorrectionRule) -> bool:
        """Make the next change that a rule allows; False if there is none."""
        self.score = read.score
        changed = {change.place for change in self.changes}
        left = [one for one in read.proposals if one.place not in changed]
        self.refused = tuple(_best(one, read.score) for one in left)
        chosen = choose_change(left, rule)
        if chosen is None:
            return False
        proposal, new = left[chosen[0]], left[chosen[0]].candidates[chosen[1]]
        score = read.score + proposal.gains[chosen[1]]
        self.changes.append(Change(proposal.place, proposal.word, new, score))
        self.text = exchanged(self.text, proposal.place, new)
        return True

    def finished(self, rule: CorrectionRule) -> Correction:
        return Correction(
            self.first.text,
            self.first.score,
            self.text,
            self.score,
            tuple(_suspect(place, self.first, rule) for place in range(len(self.first.words))),
            tuple(self.changes),
            self.refused if rule.usable else (),
            rule,
        )


def _best(proposal: Proposal, score: float) -> Change:
    at = max(range(len(proposal.gains)), key=proposal.gains.__getitem__)
    gain = proposal.gains[at]
    return Change(proposal.place, proposal.word, proposal.candidates[at], score + gain)


def _suspect(place: int, read: ReadCaption, rule: CorrectionRule) -> SuspectWord:
    """A word with those of its candidates that the rule allows."""
    allowed = [
        new
        for one in read.proposals
        if one.place == place
        for new, gain in zip(one.candidates, one.gains, strict=True)
        if rule.allows(gain)
    ]
    return replace(read.words[place], suggestions=tuple(allowed))


@dataclass(frozen=True)
class ReadCaption:
    """A caption as a corrector reads it: its score, its words, and what could replace some."""

    text: str
    score: float
    words: tuple[SuspectWord, ...]
    proposals: tuple[Proposal, ...]


class CaptionReader:
    """A model that reads captions of a few images."""

    def __init__(self, model: Model, images: Sequence[Fragments], candidates: int) -> None:
        self.model, self.matcher, self.candidates = model, correcting(model), candidates
        self.images = model.encode_images(pad_fragments(list(images)).to(model.device))
        self.ordinary = torch.from_numpy(MaskTokens.of(model.text).ordinary).to(model.device)

    def read(
        self, rows: Sequence[int], captions: Sequence[str], threshold: float, most: int = 0
    ) -> list[ReadCaption]:
        """Read captions, each of the image of its row.

        Candidates are scored for words at least as likely wrong as ``threshold``, and only for the
        ``most`` likely ones if that is above 0.
        """
        suspects = self.suspects(rows, captions, threshold)
        doubtful = [_doubtful(words, threshold, most) for words in suspects]
        tries = [
            (at, place, candidate)
            for at, places in enumerate(doubtful)
            for place in places
            for candidate in suspects[at][place].suggestions
        ]
        scores = self.scores(
            [*rows, *(rows[at] for at, _, _ in tries)],
            [*captions, *(exchanged(captions[at], place, new) for at, place, new in tries)],
        )
        before = scores[: len(captions)]
        gains: dict[tuple[int, int], list[float]] = {}
        for (at, place, _), score in zip(tries, scores[len(captions) :], strict=True):
            gains.setdefault((at, place), []).append(score - before[at])
        return [
            ReadCaption(
                captions[at],
                before[at],
                tuple(words),
                tuple(_proposal(place, words[place], gains[at, place]) for place in doubtful[at]),
            )
            for at, words in enumerate(suspects)
        ]

    def suspects(
        self, rows: Sequence[int], captions: Sequence[str], threshold: float
    ) -> list[list[SuspectWord]]:
        """Every word of each caption; those likely wrong with all candidates of their word class.

        A word that the tokenizer cut off is not suspected.
        """
        states = self.matcher.states(self._image(rows), self._encode(captions)).words
        wrong = self.matcher.heads["discrimination"](states).softmax(-1)[..., 0].tolist()
        logits = self.matcher.heads["correction"](states, word_table(self.model))
        wide = max(MIN_TOKENS_READ, CANDIDATES_READ * self.candidates)
        wide = min(len(self.ordinary), wide)
        ids = self.ordinary[logits[..., self.ordinary].topk(wide).indices].tolist()
        return [
            self._words(caption, wrong[at], ids[at], threshold)
            for at, caption in enumerate(captions)
        ]

    def _words(
        self, caption: str, wrong: list[float], ids: list[list[int]], threshold: float
    ) -> list[SuspectWord]:
        read, found = known_text(self.model.text, caption), caption_words(caption)
        known = caption_words(read.text)
        places = {word.start: place for place, word in enumerate(found)}
        tokens: dict[int, list[int]] = {}
        for token, owner in enumerate(words_of_tokens(self.model.text, read.text, known)):
            if owner is not None and known[owner].start in places:
                tokens.setdefault(places[known[owner].start], []).append(token)
        unknown = {word.start for word in read.unknown}
        suspects = []
        for place, word in enumerate(found):
            own = tokens.get(place, [])
            doubt = max((wrong[token] for token in own), default=0.0)
            suggested: tuple[str, ...] = ()
            if doubt >= threshold:
                suggested = self._suggested(caption, place, word, [ids[token] for token in own])
            span, known_word = (word.start, word.end), word.start not in unknown
            suspects.append(SuspectWord(word.text, span, doubt, suggested, known_word))
        return suspects

    def _suggested(
        self, caption: str, place: int, word: CaptionWord, ranked: list[list[int]]
    ) -> tuple[str, ...]:
        """Words spelt by the likeliest ids of each token of a word, then by the next, and so on."""
        if word.is_punctuation:
            return ()
        parts = tokens_of(caption)
        fitting: dict[str, None] = {}
        for ids in zip(*ranked, strict=True):
            new = spell(self.model.text, list(ids))
            if _may_replace(parts[place], new) and keeps_word_class(parts, place, new.lower()):
                new = new.upper() if caption.isupper() else in_case_of(word.text, new)
                # beside some signs a word is read otherwise: *u.k* before a full stop
                if len(caption_words(exchanged(caption, place, new))) == len(parts):
                    fitting.setdefault(new)
            if len(fitting) == self.candidates:
                break
        return tuple(fitting)

    def scores(self, rows: Sequence[int], captions: Sequence[str]) -> list[float]:
        """Scores of captions, each with the image of its row."""
        scores: list[float] = []
        for start in range(0, len(captions), SCORE_BATCH):
            some = slice(start, start + SCORE_BATCH)
            images, texts = self._image(rows[some]), self._encode(captions[some])
            scores += self.matcher.paired(images, texts).tolist()
        return scores

    def _image(self, rows: Sequence[int]) -> Encoded:
        return self.images[torch.tensor(list(rows), dtype=torch.long, device=self.model.device)]

    def _encode(self, captions: Sequence[str]) -> Encoded:
        text = self.model.text
        read = [known_text(text, caption).text for caption in captions]
        batch = pad_texts([text.encode(caption) for caption in read], text.pad)
        return self.model.encode_texts(batch.to(self.model.device))


def _proposal(place: int, word: SuspectWord, gains: Sequence[float]) -> Proposal:
    return Proposal(place, word.word, word.wrong, word.suggestions, tuple(gains))


def _doubtful(words: Sequence[SuspectWord], threshold: float, most: int) -> list[int]:
    """Places of the words that are likely enough wrong and can be replaced, likeliest first."""
    places = [at for at, one in enumerate(words) if one.wrong >= threshold and one.suggestions]
    return sorted(places, key=lambda at: -words[at].wrong)[: most or None]


def spell(text: TextProcessor, ids: list[int]) -> str:
    """The first word that some ids stand for; empty where they begin in the middle of one."""
    if isinstance(text, WordText):
        return text.vocabulary.entries[ids[0]]
    if not isinstance(text, HuggingFaceText):
        raise ConfigError(f"correct: text of kind '{text.kind}' cannot be spelt back")
    pieces: list[str] = text.tokenizer.convert_ids_to_tokens(ids)
    if pieces[0].startswith(PIECE):
        return ""
    more = takewhile(lambda piece: piece.startswith(PIECE), pieces[1:])
    spelt: str = text.tokenizer.convert_tokens_to_string([pieces[0], *more])
    return spelt.strip()


def _may_replace(old: str, new: str) -> bool:
    """Whether ``new`` is one word, and another one; *a* and *an* follow the word after them."""
    spans = caption_words(new)
    if len(spans) != 1 or spans[0].is_punctuation or new.lower() == old:
        return False
    return not {old, new.lower()} <= {"a", "an"}


def exchanged(caption: str, place: int, instead: str) -> str:
    """A caption with one word replaced; an article before it follows (*a dog*, *an elephant*).

    >>> exchanged("An elephant runs.", 1, "dog")
    'A dog runs.'
    """
    spans = caption_words(caption)
    word = spans[place]
    start, before = word.start, caption[: word.start]
    if place and (article := article_before(spans[place - 1].text, instead)):
        start = spans[place - 1].start
        article = article.upper() if caption.isupper() else article
        before = caption[:start] + article + caption[spans[place - 1].end : word.start]
    return before + instead + caption[word.end :]
