"""Caption correction with TAGS-DC: find the wrong words of a caption and suggest replacements.

The head ``discrimination`` finds wrong words, the head ``correction`` proposes others. A proposal
becomes a suggestion if it has the same part of speech as the word it replaces and raises the
matching score by more than the margin of the `CorrectionRule`.
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
"""Tokens read per wanted candidate: many are of another word class."""
MIN_TOKENS_READ = 40
"""Minimum of tokens read, so that fewer candidates are a prefix of more."""


def can_correct(model: Model) -> bool:
    """Whether a model has the heads that find and replace wrong words."""
    matcher = model.matcher
    return isinstance(matcher, CrossEncoder) and all(head in matcher.heads for head in HEADS)


def correction_matcher(model: Model) -> CrossEncoder:
    """The matcher of a model that can correct captions; raises for other models."""
    matcher = model.matcher
    if not isinstance(matcher, CrossEncoder) or not can_correct(model):
        raise ConfigError(
            f"the model '{model.spec.name}' cannot correct captions: train one with the "
            "objective tags-dc (recipe scenes/tags-dc)"
        )
    return matcher


@dataclass(frozen=True)
class SuspectWord:
    """A word, its probability of being wrong, and suggested replacements, likeliest first.

    Only a word that reaches the rule's threshold has suggestions. Each keeps the part of speech and
    raises the score by more than the rule's margin. Words that are not ``known`` are not judged.
    """

    word: str
    span: tuple[int, int]
    wrong: float
    suggestions: tuple[str, ...]
    known: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "span": list(self.span), "suggestions": list(self.suggestions)}


@dataclass(frozen=True)
class Change:
    """The replacement of a word, by its index in the caption, and the score after it."""

    position: int
    word: str
    instead: str
    score: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "place": self.position,
            "word": self.word,
            "instead": self.instead,
            "score": self.score,
        }


@dataclass(frozen=True)
class Correction:
    """A caption, its words, and the corrected caption.

    ``corrected`` never scores below ``text``; they are equal if no change helps. ``changes`` were
    made, each with the score after it. ``refused`` are the best candidates for other likely wrong
    words, which would not raise the score by enough; empty if the ``rule`` is not usable.
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
            **asdict(self),
            "words": [word.as_dict() for word in self.words],
            "changes": [change.as_dict() for change in self.changes],
            "refused": [change.as_dict() for change in self.refused],
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
    """Find and correct the wrong words of an image's caption; the image is given as fragments.

    The likeliest wrong word comes first; after each change, the whole caption is read again.
    ``threshold``, ``margin`` and ``candidates`` default to those of the model's rule.
    """
    rule = rule_of(model, threshold, margin, candidates)
    return correct_batch(model, [image], [caption], rule)[0]


@torch.inference_mode()
def correct_batch(
    model: Model, images: Sequence[Fragments], captions: Sequence[str], rule: CorrectionRule
) -> list[Correction]:
    """Correct one caption per image, in one batch, with the results of `correct`."""
    if not all(caption_words(caption) for caption in captions):
        raise DataError("the caption has no words; give at least one word to correct")
    with eval_mode(model):
        reader = CaptionReader(model, images, rule.candidates)
        return _correct_all(reader, captions, rule)


def rule_of(
    model: Model,
    threshold: float | None = None,
    margin: float | None = None,
    candidates: int | None = None,
) -> CorrectionRule:
    """The rule of a model, with the given values replaced.

    A given margin makes the rule usable, whatever was measured on dev.
    """
    rule = model.correction_rule or CorrectionRule()
    given = {"threshold": threshold, "margin": margin, "candidates": candidates}
    given = {name: value for name, value in given.items() if value is not None}
    if margin is not None:
        rule = replace(rule, usable=True)
    other = replace(rule, **given)  # type: ignore[arg-type]
    return rule if other == rule else replace(other, precision=None, made=None)


def _correct_all(
    reader: CaptionReader, captions: Sequence[str], rule: CorrectionRule
) -> list[Correction]:
    """Correct in rounds of one change per caption; only changed captions are read again."""
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
    """A caption that is being corrected."""

    first: ReadCaption
    text: str
    score: float = 0.0
    changes: list[Change] = field(default_factory=list)
    refused: tuple[Change, ...] = ()

    def change(self, read: ReadCaption, rule: CorrectionRule) -> bool:
        """Make the next change that a rule allows; False if there is none."""
        self.score = read.score
        changed = {change.position for change in self.changes}
        left = [one for one in read.proposals if one.position not in changed]
        self.refused = tuple(_best(one, read.score) for one in left)
        chosen = choose_change(left, rule)
        if chosen is None:
            return False
        proposal, new = left[chosen[0]], left[chosen[0]].candidates[chosen[1]]
        score = read.score + proposal.gains[chosen[1]]
        self.changes.append(Change(proposal.position, proposal.word, new, score))
        self.text = exchanged(self.text, proposal.position, new)
        return True

    def finished(self, rule: CorrectionRule) -> Correction:
        return Correction(
            self.first.text,
            self.first.score,
            self.text,
            self.score,
            tuple(
                _suspect(position, self.first, rule) for position in range(len(self.first.words))
            ),
            tuple(self.changes),
            self.refused if rule.usable else (),
            rule,
        )


def _best(proposal: Proposal, score: float) -> Change:
    at = max(range(len(proposal.gains)), key=proposal.gains.__getitem__)
    gain = proposal.gains[at]
    return Change(proposal.position, proposal.word, proposal.candidates[at], score + gain)


def _suspect(position: int, read: ReadCaption, rule: CorrectionRule) -> SuspectWord:
    """A word with the candidates that the rule allows."""
    allowed = [
        new
        for one in read.proposals
        if one.position == position
        for new, gain in zip(one.candidates, one.gains, strict=True)
        if rule.allows(gain)
    ]
    return replace(read.words[position], suggestions=tuple(allowed))


@dataclass(frozen=True)
class ReadCaption:
    """A caption with its score, its words, and the proposals for likely wrong words."""

    text: str
    score: float
    words: tuple[SuspectWord, ...]
    proposals: tuple[Proposal, ...]


class CaptionReader:
    """Finds wrong words and candidates in captions of a batch of images."""

    def __init__(self, model: Model, images: Sequence[Fragments], candidates: int) -> None:
        self.model, self.matcher, self.candidates = model, correction_matcher(model), candidates
        self.images = model.encode_images(pad_fragments(list(images)).to(model.device))
        self.ordinary = torch.from_numpy(MaskTokens.of(model.text).ordinary).to(model.device)

    def read(
        self, rows: Sequence[int], captions: Sequence[str], threshold: float, most: int = 0
    ) -> list[ReadCaption]:
        """Read captions, each with the image of its row.

        Candidates are scored for words that reach ``threshold``; only for the ``most`` likeliest
        of them if ``most`` is above 0.
        """
        suspects = self.suspects(rows, captions, threshold)
        doubtful = [_doubtful(words, threshold, most) for words in suspects]
        tries = [
            (at, position, candidate)
            for at, positions in enumerate(doubtful)
            for position in positions
            for candidate in suspects[at][position].suggestions
        ]
        scores = self.scores(
            [*rows, *(rows[at] for at, _, _ in tries)],
            [*captions, *(exchanged(captions[at], position, new) for at, position, new in tries)],
        )
        before = scores[: len(captions)]
        gains: dict[tuple[int, int], list[float]] = {}
        for (at, position, _), score in zip(tries, scores[len(captions) :], strict=True):
            gains.setdefault((at, position), []).append(score - before[at])
        return [
            ReadCaption(
                captions[at],
                before[at],
                tuple(words),
                tuple(_proposal(p, words[p], gains[at, p]) for p in doubtful[at]),
            )
            for at, words in enumerate(suspects)
        ]

    def suspects(
        self, rows: Sequence[int], captions: Sequence[str], threshold: float
    ) -> list[list[SuspectWord]]:
        """Every word of each caption; likely wrong ones with all candidates of their word class.

        Words beyond the tokenizer's maximum length are never suspected.
        """
        states = self.matcher.states(self._image(rows), self._encode(captions)).words
        wrong = self.matcher.heads["discrimination"](states).softmax(-1)[..., 0].tolist()
        logits = self.matcher.heads["correction"](states, word_table(self.model))
        count = max(MIN_TOKENS_READ, CANDIDATES_READ * self.candidates)
        best = logits[..., self.ordinary].topk(min(len(self.ordinary), count)).indices
        ids = self.ordinary[best].tolist()
        return [
            self._words(caption, wrong[at], ids[at], threshold)
            for at, caption in enumerate(captions)
        ]

    def _words(
        self, caption: str, wrong: list[float], ids: list[list[int]], threshold: float
    ) -> list[SuspectWord]:
        read, words = known_text(self.model.text, caption), caption_words(caption)
        known = caption_words(read.text)
        positions = {word.start: position for position, word in enumerate(words)}
        tokens: dict[int, list[int]] = {}
        for token, owner in enumerate(words_of_tokens(self.model.text, read.text, known)):
            if owner is not None and known[owner].start in positions:
                tokens.setdefault(positions[known[owner].start], []).append(token)
        unknown = {word.start for word in read.unknown}
        suspects = []
        for position, word in enumerate(words):
            own = tokens.get(position, [])
            doubt = max((wrong[token] for token in own), default=0.0)
            suggested: tuple[str, ...] = ()
            if doubt >= threshold:
                suggested = self._suggested(caption, position, word, [ids[token] for token in own])
            span, known_word = (word.start, word.end), word.start not in unknown
            suspects.append(SuspectWord(word.text, span, doubt, suggested, known_word))
        return suspects

    def _suggested(
        self, caption: str, position: int, word: CaptionWord, ranked: list[list[int]]
    ) -> tuple[str, ...]:
        """Words decoded from the likeliest ids of each token, then from the second likeliest, …"""
        if word.is_punctuation:
            return ()
        parts = tokens_of(caption)
        fitting: dict[str, None] = {}
        for ids in zip(*ranked, strict=True):
            new = spell(self.model.text, list(ids))
            if _may_replace(parts[position], new) and keeps_word_class(
                parts, position, new.lower()
            ):
                new = new.upper() if caption.isupper() else in_case_of(word.text, new)
                # punctuation may change how a word is split: *u.k* before a full stop
                if len(caption_words(exchanged(caption, position, new))) == len(parts):
                    fitting.setdefault(new)
            if len(fitting) == self.candidates:
                break
        return tuple(fitting)

    def scores(self, rows: Sequence[int], captions: Sequence[str]) -> list[float]:
        """Scores of captions, each with the image of its row."""
        scores: list[float] = []
        for start in range(0, len(captions), SCORE_BATCH):
            batch = slice(start, start + SCORE_BATCH)
            images, texts = self._image(rows[batch]), self._encode(captions[batch])
            scores += self.matcher.paired(images, texts).tolist()
        return scores

    def _image(self, rows: Sequence[int]) -> Encoded:
        return self.images[torch.tensor(list(rows), dtype=torch.long, device=self.model.device)]

    def _encode(self, captions: Sequence[str]) -> Encoded:
        text = self.model.text
        read = [known_text(text, caption).text for caption in captions]
        batch = pad_texts([text.encode(caption) for caption in read], text.pad)
        return self.model.encode_texts(batch.to(self.model.device))


def _proposal(position: int, word: SuspectWord, gains: Sequence[float]) -> Proposal:
    return Proposal(position, word.word, word.wrong, word.suggestions, tuple(gains))


def _doubtful(words: Sequence[SuspectWord], threshold: float, most: int) -> list[int]:
    """Indices of likely wrong words with candidates, likeliest first."""
    positions = [at for at, one in enumerate(words) if one.wrong >= threshold and one.suggestions]
    return sorted(positions, key=lambda at: -words[at].wrong)[: most or None]


def spell(text: TextProcessor, ids: list[int]) -> str:
    """The first word that the ids decode to; empty if they begin within a word."""
    if isinstance(text, WordText):
        return text.vocabulary.entries[ids[0]]
    if not isinstance(text, HuggingFaceText):
        raise ConfigError(f"correct: cannot decode tokens of a '{text.kind}' text processor")
    pieces: list[str] = text.tokenizer.convert_ids_to_tokens(ids)
    if pieces[0].startswith(PIECE):
        return ""
    more = takewhile(lambda piece: piece.startswith(PIECE), pieces[1:])
    spelt: str = text.tokenizer.convert_tokens_to_string([pieces[0], *more])
    return spelt.strip()


def _may_replace(old: str, new: str) -> bool:
    """Whether ``new`` is one word and differs from ``old`` by more than *a* and *an*."""
    spans = caption_words(new)
    if len(spans) != 1 or spans[0].is_punctuation or new.lower() == old:
        return False
    return not {old, new.lower()} <= {"a", "an"}


def exchanged(caption: str, position: int, instead: str) -> str:
    """A caption with one word replaced, and the article before it adapted (*a* or *an*).

    >>> exchanged("An elephant runs.", 1, "dog")
    'A dog runs.'
    """
    spans = caption_words(caption)
    word = spans[position]
    start, before = word.start, caption[: word.start]
    if position and (article := article_before(spans[position - 1].text, instead)):
        start = spans[position - 1].start
        article = article.upper() if caption.isupper() else article
        before = caption[:start] + article + caption[spans[position - 1].end : word.start]
    return before + instead + caption[word.end :]
