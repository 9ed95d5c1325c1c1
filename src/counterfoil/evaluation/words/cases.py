"""False captions with known wrong words: from the truth of drawn scenes, by rule, or by a model.

Only the truth of drawn scenes makes sure that a foil is false. Rules and models see the captions of
an image, so a foil may happen to be true; the words of the image's own captions are avoided.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.pairs import Split
from counterfoil.data.scenes import (
    Foil,
    Scene,
    SceneCaption,
    captions_of,
    falsify,
    scene_of,
    tokens,
)
from counterfoil.data.text.words import caption_words, is_content_word, words
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.foils.sets import FoilSet, choose_captions, foils_by_rule
from counterfoil.evaluation.foils.truth import has_truth
from counterfoil.foils import DEFAULT_KINDS
from counterfoil.foils.grammar import keeps_word_class
from counterfoil.foils.lexicon import NOUN_FORMS, THINGS
from counterfoil.foils.rules import in_case_of
from counterfoil.models.correct import exchanged

KINDS = ("object", "attribute", "count", "relation", "position")
MAX_WORDS = 3
ARTICLES = ("a", "an")
FLUENT = "fluent"
"""Kind of the exchanges that a language model makes."""


@dataclass(frozen=True)
class FoilCase:
    """A caption of image ``image`` (an index into the split), and its foil.

    ``wrong`` has the kind of error of each word of ``foil`` without punctuation; "" if it is right.
    """

    image: int
    caption: str
    foil: str
    wrong: tuple[str, ...]

    @property
    def kinds(self) -> set[str]:
        return {kind for kind in self.wrong if kind}

    @property
    def labels(self) -> NDArray[np.bool_]:
        return np.array([bool(kind) for kind in self.wrong])


@dataclass(frozen=True)
class Foils:
    """The cases of a split sorted by image; ``left_out`` of ``captions`` captions have none."""

    cases: list[FoilCase]
    captions: int
    left_out: int


def make_foils(
    split: Split, per_caption: int = 1, max_captions: int | None = None, seed: int = 0
) -> Foils:
    """``per_caption`` false captions for each caption, with one to three words exchanged.

    The kind of a single exchange is drawn from those the caption allows, so that rare kinds occur,
    too. The same split and seed give the same foils, whatever ``max_captions`` is.
    """
    if split.extras is None or not has_truth(split):
        raise DataError(
            f"split '{split.name}' does not say what is true of its images, so no caption can be "
            "made false for sure: word-level truth needs the drawn scenes (--data scenes)"
        )
    if per_caption < 1 or (max_captions is not None and max_captions < 1):
        raise ConfigError(
            f"foils: expected at least 1 per caption and 1 caption, got {per_caption} and "
            f"{max_captions}"
        )
    chosen = set(choose_captions(split, max_captions, seed))
    cases: list[FoilCase] = []
    left_out = position = 0
    for image in range(len(split)):
        count = len(split.captions[image])
        numbers = [number for number in range(count) if position + number in chosen]
        position += count
        if not numbers:
            continue
        extras = split.extras[image]
        scene, captions = scene_of(extras), captions_of(extras, split.captions[image])
        for number in numbers:
            stem = f"{seed}/{split.ids[image]}/{number}"
            foils = _falsify(scene, captions[number], per_caption, stem)
            cases += [_case(image, captions[number].text, foil) for foil in foils]
            left_out += not foils
    if not cases:
        raise DataError(f"split '{split.name}': none of its captions can be made false")
    return Foils(cases, len(chosen), left_out)


def _falsify(scene: Scene, caption: SceneCaption, number: int, stem: str) -> list[Foil]:
    """Up to ``number`` different foils of a caption, each with its own random generator."""
    foils: dict[str, Foil] = {}
    for attempt in range(2 * number):
        if len(foils) == number:
            break
        rng = random.Random(f"{stem}/{attempt}")
        words = rng.randint(1, MAX_WORDS)
        foil = None
        for kind in rng.sample(KINDS, len(KINDS)) if words == 1 else ():
            foil = foil or falsify(scene, caption, rng, 1, (kind,))
        foil = foil or falsify(scene, caption, rng, words)
        # Both ways to split the text into words must agree.
        if foil is not None and _words_of(foil.text) == tokens(foil.text):
            foils.setdefault(foil.text, foil)
    return list(foils.values())


def _words_of(text: str) -> list[str]:
    return [word.text.lower() for word in caption_words(text) if not word.is_punctuation]


def _case(image: int, caption: str, foil: Foil) -> FoilCase:
    wrong = [""] * len(tokens(foil.text))
    for position, kind in zip(foil.positions, foil.kinds, strict=True):
        wrong[position] = kind
    return FoilCase(image, caption, foil.text, tuple(wrong))


def rule_cases(
    split: Split,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    per_caption: int = 1,
    most: int | None = None,
    seed: int = 0,
) -> Foils:
    """The foils of `rule_set`, with the words that each of them exchanged.

    They are usually, not certainly, false of a photo. An article that only agrees with its new noun
    does not count as wrong.
    """
    foils = foils_by_rule(split, kinds, per_caption, most, seed)
    cases = [
        _exchange(split, index, foil.text, foil.kind)
        for index, made in foils.items()
        for foil in made
    ]
    if not cases:
        raise DataError(f"split '{split.name}': no rule can make any of its captions false")
    return Foils(cases, len(foils), sum(not made for made in foils.values()))


def written_cases(split: Split, foils: FoilSet) -> Foils:
    """The foils that a model wrote, with the words that each of them exchanged.

    Foils with another number of words are left out.
    """
    cases = [
        _exchange(split, pair.caption, pair.foil, "written")
        for pair in foils.pairs
        if len(words(pair.foil)) == len(words(split.texts[pair.caption]))
    ]
    if not cases:
        raise DataError(f"{foils.name}: no foil has as many words as its caption")
    return Foils(cases, foils.captions, foils.left_out)


def fluent_cases(
    split: Split, language: CaptionModel, *, most: int | None = None, seed: int = 0
) -> Foils:
    """One content word per caption, exchanged for one that a language model draws in its place.

    A drawn word is as likely as the words around it allow, so that a language model cannot tell it
    from a true one. It has the word class of the old one, and neither it nor a name of the same
    thing is in a caption of the image.
    """
    cases: list[FoilCase] = []
    chosen = choose_captions(split, most, seed)
    for index in chosen:
        text = split.texts[index]
        own = split.captions[int(split.image_of[index])]
        avoid = {word for caption in own for word in words(caption)}
        foil = _draw_fluent(text, avoid, language, random.Random(f"{seed}/{index}/{text}"))
        if foil is not None:
            cases.append(_exchange(split, index, foil, FLUENT))
    if not cases:
        raise DataError(f"split '{split.name}': the language model can exchange no word")
    return Foils(cases, len(chosen), len(chosen) - len(cases))


def _draw_fluent(
    text: str, avoid: set[str], language: CaptionModel, rng: random.Random
) -> str | None:
    tokens, spans = words(text), caption_words(text)
    places = [k for k, word in enumerate(tokens) if is_content_word(word) and word in language.ids]
    contexts = language.in_context(text) if places else []
    for position in rng.sample(places, len(places)):
        logs = {
            word: log
            for word, log in contexts[position].items()
            if is_content_word(word)
            and not _names_the_same(word, avoid)
            and keeps_word_class(tokens, position, word)
        }
        if not logs:
            continue
        weights = np.exp(np.array(list(logs.values())) - max(logs.values()))
        new = rng.choices(list(logs), weights.tolist())[0]
        foil = exchanged(text, position, in_case_of(spans[position].text, new))
        if len(words(foil)) == len(tokens):
            return foil
    return None


def _names_the_same(word: str, avoid: set[str]) -> bool:
    form = NOUN_FORMS.get(word)
    related = THINGS[form.thing].related if form is not None else ()
    return word in avoid or not avoid.isdisjoint(related)


def _exchange(split: Split, caption: int, foil: str, kind: str) -> FoilCase:
    """The case of a foil with as many words as its caption; other articles are not wrong."""
    text = split.texts[caption]
    pairs = zip(words(text), words(foil), caption_words(foil), strict=True)
    wrong = tuple(
        kind if old != new and not (old in ARTICLES and new in ARTICLES) else ""
        for old, new, word in pairs
        if not word.is_punctuation
    )
    return FoilCase(int(split.image_of[caption]), text, foil, wrong)
