"""Which words of a caption are wrong for an image, and what they should be (TAGS-DC).

The head ``discrimination`` finds the words, ``correction`` says what could stand there, and the
matching score has the last word: of what could stand there, the likeliest that raises it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from counterfoil.data.batches import pad_fragments, pad_texts
from counterfoil.data.fragments import Fragments
from counterfoil.data.texts import HuggingFaceText, TextProcessor, WordText
from counterfoil.encoders import Encoded
from counterfoil.errors import ConfigError, DataError
from counterfoil.foils.masking import MaskTokens
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models.asking import asked
from counterfoil.models.foil_maker import word_table
from counterfoil.models.word_spans import (
    CaptionWord,
    caption_words,
    known_text,
    words_of_tokens,
)

if TYPE_CHECKING:
    from counterfoil.models.model import Model

HEADS = ("discrimination", "correction")
PIECE = "##"


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
            "objective tags-dc (recipes/tags-dc-scenes.yaml)"
        )
    return matcher


@dataclass(frozen=True)
class SuspectWord:
    """A word, how likely it is wrong, and what could stand in its place, likeliest first.

    A word that the model does not know is left out, so nothing is said of it.
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

    ``corrected`` never scores below ``text``: it is the same where no change helps. ``changes`` are
    those made, each with the score after it; ``refused`` the best that was thought of for a word
    held to be wrong, but lowers the score.
    """

    text: str
    score: float
    corrected: str
    corrected_score: float
    words: tuple[SuspectWord, ...]
    changes: tuple[Change, ...]
    refused: tuple[Change, ...]

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
        }


@torch.inference_mode()
def correct(
    model: Model,
    image: Fragments,
    caption: str,
    *,
    threshold: float = 0.5,
    suggestions: int = 5,
) -> Correction:
    """Find the wrong words of a caption of an image, given as fragments, and correct them.

    The word most likely wrong comes first; after a change, the whole sentence is looked at again.
    Words below the ``threshold`` stay. ``suggestions`` are tried for each.
    """
    if suggestions < 1:
        raise ConfigError(f"correct: expected at least 1 suggestion, got {suggestions}")
    if not caption_words(caption):
        raise DataError("the caption has no words: there is nothing to correct")
    with asked(model):
        corrector = _Corrector(model, image, suggestions)
        return corrector.correct(caption, threshold)


class _Corrector:
    """A model that looks at one image."""

    def __init__(self, model: Model, image: Fragments, suggestions: int) -> None:
        self.model, self.matcher, self.suggestions = model, correcting(model), suggestions
        self.image = model.encode_images(pad_fragments([image]).to(model.device))
        self.ordinary = torch.from_numpy(MaskTokens.of(model.text).ordinary).to(model.device)

    def correct(self, caption: str, threshold: float) -> Correction:
        first = self.suspects(caption)
        text, score = caption, self.scores([caption])[0]
        before, words = score, first
        changes: list[Change] = []
        refused: list[Change] = []
        looked_at: set[int] = set()
        while True:
            place = _worst(words, threshold, looked_at)
            if place is None:
                break
            looked_at.add(place)
            sentences = [_exchanged(text, words[place], new) for new in words[place].suggestions]
            found = self.scores(sentences)
            chosen = _likeliest_better(found, score)
            instead = words[place].suggestions[chosen]
            change = Change(place, words[place].word, instead, found[chosen])
            if found[chosen] <= score:
                refused.append(change)
                continue
            changes.append(change)
            text, score = sentences[chosen], found[chosen]
            words = self.suspects(text)
        return Correction(
            caption, before, text, score, tuple(first), tuple(changes), tuple(refused)
        )

    def suspects(self, caption: str) -> list[SuspectWord]:
        """Each word of a caption; one that the tokenizer cut off is not suspected."""
        read = known_text(self.model.text, caption)
        known = caption_words(read.text)
        found = sorted([*known, *read.unknown], key=lambda word: word.start)
        place_of = {word: place for place, word in enumerate(found)}
        tokens: dict[int, list[int]] = {}
        for token, word in enumerate(words_of_tokens(self.model.text, read.text, known)):
            if word is not None:
                tokens.setdefault(place_of[known[word]], []).append(token)
        states = self.matcher.states(self.image, self._encode([caption])).words[0]
        wrong = self.matcher.heads["discrimination"](states).softmax(-1)[:, 0]
        logits = self.matcher.heads["correction"](states, word_table(self.model))
        ranked = logits[:, self.ordinary].topk(min(len(self.ordinary), 4 * self.suggestions))
        ids = self.ordinary[ranked.indices].tolist()
        return [
            SuspectWord(
                word.text,
                (word.start, word.end),
                max((float(wrong[token]) for token in tokens.get(place, ())), default=0.0),
                self._suggested(word, [ids[token] for token in tokens.get(place, ())]),
                word not in read.unknown,
            )
            for place, word in enumerate(found)
        ]

    def _suggested(self, word: CaptionWord, ranked: list[list[int]]) -> tuple[str, ...]:
        """Words spelt by the likeliest ids of each token of a word, then by the next, and so on."""
        if word.is_punctuation:
            return ()
        spelt = (spell(self.model.text, list(ids)) for ids in zip(*ranked, strict=True))
        kept = dict.fromkeys(_cased(new, word.text) for new in spelt if _is_one_word(new))
        kept.pop(word.text, None)
        return tuple(kept)[: self.suggestions]

    def scores(self, captions: list[str]) -> list[float]:
        rows = torch.zeros(len(captions), dtype=torch.long, device=self.model.device)
        scores = self.matcher.paired(self.image[rows], self._encode(captions))
        return [float(score) for score in scores]

    def _encode(self, captions: list[str]) -> Encoded:
        text = self.model.text
        read = [known_text(text, caption).text for caption in captions]
        batch = pad_texts([text.encode(caption) for caption in read], text.pad)
        return self.model.encode_texts(batch.to(self.model.device))


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


def _likeliest_better(scores: list[float], before: float) -> int:
    """The first suggestion that raises the score, as the likeliest comes first; else the best."""
    best = max(range(len(scores)), key=scores.__getitem__)
    return next((place for place, score in enumerate(scores) if score > before), best)


def _is_one_word(text: str) -> bool:
    found = caption_words(text)
    return len(found) == 1 and not found[0].is_punctuation


def _cased(word: str, like: str) -> str:
    """A word with the capital that another has."""
    return word[:1].upper() + word[1:] if like[:1].isupper() else word


def _exchanged(caption: str, word: SuspectWord, instead: str) -> str:
    start, end = word.span
    return caption[:start] + instead + caption[end:]


def _worst(words: list[SuspectWord], threshold: float, looked_at: set[int]) -> int | None:
    """The word most likely wrong that was not looked at yet and can be replaced."""
    places = [
        place
        for place, word in enumerate(words)
        if word.wrong >= threshold and word.suggestions and place not in looked_at
    ]
    return max(places, key=lambda place: words[place].wrong, default=None)
