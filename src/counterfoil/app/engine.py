"""Model inference for the web service: batched jobs, run on the queue's single thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F

from counterfoil.app.images import Library
from counterfoil.app.problems import Problem
from counterfoil.app.searcher import Searcher
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.tokenizers import known_text, words_of_tokens
from counterfoil.data.text.words import CaptionWord, caption_words
from counterfoil.encoders import Encoded
from counterfoil.features.views import find_grid
from counterfoil.matchers.naaf import NAAF
from counterfoil.models.correct import Change, Correction, correct, exchanged
from counterfoil.models.explain import explain_encoded
from counterfoil.models.match import shades
from counterfoil.models.model import Model
from counterfoil.plots.sentences import color_note, method_note, score_note
from counterfoil.scoring.encode import encode_texts
from counterfoil.search.items import Side

MAX_CHANGES = 4

MIN_GAIN = 0.05
"""Smallest relative gain in score of a proposed change; tiny gains exist for nearly any word."""

Scores = Callable[[Sequence[str]], Sequence[float]]
"""Scores of a batch of sentences with one image."""

FRAGMENT_CACHE_SIZE = 256
"""Images whose fragments stay in memory."""


def distributions(model: Model) -> dict[str, Any] | None:
    """NAAF's boundary, and mean and deviation of the similarities on both sides of it.

    None for other matchers.
    """
    matcher = model.matcher
    if not isinstance(matcher, NAAF) or matcher.directions != ("t2i",):
        return None
    learned = matcher.diagnostics()
    sides = {}
    for name, key in (("matched", "pos"), ("mismatched", "neg")):
        mean, std = (learned.get(f"mismatch/{what}_{key}") for what in ("mean", "std"))
        sides[name] = {"mean": mean, "std": std} if mean is not None and std else None
    return {"boundary": matcher.boundary_of("t2i"), **sides}


@torch.inference_mode()
def similarities(model: Model, image: Encoded, caption: str) -> list[float | None]:
    """The highest similarity of each word with a region, which NAAF compares with its boundary."""
    read = known_text(model.text, caption)
    known = caption_words(read.text)
    words = sorted([*known, *read.unknown], key=lambda word: word.start)
    text = encode_texts(model, [read.text])
    if image.fragments is None or text.fragments is None or not bool(image.mask.any()):
        return [None] * len(words)
    regions = F.normalize(image.fragments[0][image.mask[0]].float(), dim=-1)
    best = (F.normalize(text.fragments[0].float(), dim=-1) @ regions.T).amax(-1).tolist()
    by_word: dict[CaptionWord, list[float]] = {}
    for token, word in enumerate(words_of_tokens(model.text, read.text, known)):
        if word is not None:
            by_word.setdefault(known[word], []).append(best[token])
    return [max(by_word[word]) if word in by_word else None for word in words]


# The corrector says which words are doubtful and suggests others. The matcher, whose score the page
# shows, chooses among these. A change that lowers the matcher's score is not proposed.
@dataclass(frozen=True)
class Agreed:
    """Changes, each with the matcher's score after it, and the changed sentence."""

    text: str
    score: float
    changes: tuple[Change, ...]

    def as_dict(self) -> dict[str, object]:
        return {
            "text": self.text,
            "score": self.score,
            "changes": [change.as_dict() for change in self.changes],
        }


def agree(correction: Correction, effects: Sequence[float], scores: Scores) -> Agreed:
    """Greedily make the change that raises the score most, until none raises it enough.

    Only the corrector's suggestions are tried. ``effects`` are the matcher's, per word; a word that
    raises the score is never changed.
    """
    doubtful = {
        index: word
        for index, (word, effect) in enumerate(zip(correction.words, effects, strict=True))
        if effect < 0 and word.suggestions
    }
    made: dict[int, str] = {}
    changes: list[Change] = []
    score = scores([correction.text])[0]
    while doubtful and len(changes) < MAX_CHANGES:
        tries = [(index, new) for index, word in doubtful.items() for new in word.suggestions]
        changed = scores([_replaced(correction.text, {**made, at: new}) for at, new in tries])
        best = max(range(len(tries)), key=changed.__getitem__)
        if not changed[best] >= score + MIN_GAIN * abs(score):  # also stops at NaN
            break
        index, new = tries[best]
        score, made[index] = changed[best], new
        changes.append(Change(index, doubtful.pop(index).word, new, score))
    return Agreed(_replaced(correction.text, made), score, tuple(changes))


def _replaced(text: str, words: dict[int, str]) -> str:
    """The sentence with some words replaced, by their indices."""
    for index, new in words.items():
        text = exchanged(text, index, new)
    return text


@dataclass(frozen=True)
class Encode:
    """Encode an uploaded picture."""

    picture: Image.Image


@dataclass(frozen=True)
class Score:
    """Score every image with every text."""

    model: Model
    images: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """Find the best items for a text, or for an image by its id."""

    text: str | None
    image: str | None
    k: int
    target: Side | None


@dataclass(frozen=True)
class Explain:
    model: Model
    image: str
    text: str


@dataclass(frozen=True)
class Correct:
    """Correct a sentence with one model; ``model`` scores the changes."""

    model: Model
    corrector: Model
    image: str
    text: str
    threshold: float | None


class Engine:
    """The served models, and the library that they read."""

    def __init__(self, models: Sequence[Model], library: Library) -> None:
        index = library.index
        self.library = library
        searching = [index.model] if index is not None else []
        self._models = list(dict.fromkeys([*models, *searching]))  # by identity
        for model in self._models:
            model.eval()
        self.searcher = Searcher(index) if index is not None else None
        self.scales = {model: distributions(model) for model in self._models}
        self._fragments: OrderedDict[tuple[str, str], Fragments] = OrderedDict()
        self._runners: dict[type, Callable[[Sequence[Any]], list[Any]]] = {
            Encode: lambda jobs: [self._encode(job) for job in jobs],
            Score: self._score,
            Search: self._search,
            Explain: lambda jobs: [self._explain(job) for job in jobs],
            Correct: lambda jobs: [self._correct(job) for job in jobs],
        }

    @torch.inference_mode()
    def run(self, jobs: Sequence[Any]) -> list[Any]:
        """Results of a batch of jobs of one type."""
        return self._runners[type(jobs[0])](jobs)

    def _encode(self, job: Encode) -> dict[Model, Encoded]:
        """A picture encoded by every model that reads pixels; models may share an extractor."""
        fragments: dict[str, Fragments] = {}
        encoded: dict[Model, Encoded] = {}
        for model in self._models:
            if model.fragments_from is not None:
                extractor = model.reader.extractor
                key = extractor.fingerprint()
                if key not in fragments:
                    fragments[key] = extractor.extract(job.picture)
                encoded[model] = _encode_fragments(model, fragments[key])
        return encoded

    def _score(self, jobs: Sequence[Score]) -> list[list[list[float]]]:
        results: list[list[list[float]]] = [[]] * len(jobs)
        for model in dict.fromkeys(job.model for job in jobs):
            indices = [index for index, job in enumerate(jobs) if job.model is model]
            scores = self._score_together(model, [jobs[index] for index in indices])
            for index, score in zip(indices, scores, strict=True):
                results[index] = score
        return results

    def _score_together(self, model: Model, jobs: Sequence[Score]) -> list[list[list[float]]]:
        """Score the pairs of all jobs in one batch; a repeated text or image is encoded once."""
        texts = list(dict.fromkeys(text for job in jobs for text in job.texts))
        images = list(dict.fromkeys(name for job in jobs for name in job.images))
        column = {text: at for at, text in enumerate(texts)}
        row = {name: at for at, name in enumerate(images)}
        pairs = list(
            dict.fromkeys(
                (row[name], column[text])
                for job in jobs
                for name in job.images
                for text in job.texts
            )
        )
        encoded = Encoded.cat([self._image(model, name) for name in images])
        scores = _paired(model, encoded, _encode_texts(model, texts), pairs)
        return [
            [[scores[row[name], column[text]] for text in job.texts] for name in job.images]
            for job in jobs
        ]

    def _search(self, jobs: Sequence[Search]) -> list[dict[str, Any]]:
        if self.searcher is None:
            raise Problem(409, "no library is served; start the service on an index or a run")
        model = self.searcher.index.model
        results: list[dict[str, Any]] = [{}] * len(jobs)
        groups: dict[tuple[Side, Side], list[int]] = {}
        for index, job in enumerate(jobs):
            source: Side = "captions" if job.text is not None else "images"
            other: Side = "images" if job.text is not None else "captions"
            groups.setdefault((source, job.target or other), []).append(index)
        for (source, target), indices in groups.items():
            group = [jobs[index] for index in indices]
            if source == "captions":
                queries = _encode_texts(model, [job.text or "" for job in group])
            else:
                queries = Encoded.cat([self._image(model, job.image or "") for job in group])
            lists = self.searcher.search(source, target, queries, [job.k for job in group])
            for index, hits in zip(indices, lists, strict=True):
                results[index] = {"target": target, "hits": hits}
        return results

    def _explain(self, job: Explain) -> dict[str, Any]:
        image, scale = self._image(job.model, job.image), self.scales[job.model]
        match = explain_encoded(job.model, image, job.text)
        near = similarities(job.model, image, job.text) if scale else []
        answer = match.as_dict()
        for index, (word, shade) in enumerate(zip(answer["words"], shades(match), strict=True)):
            word["shade"] = shade
            word["similarity"] = near[index] if near else None
        grid = find_grid(match.boxes) if match.boxes is not None else None
        return {
            **answer,
            "image": job.image,
            "grid": None if grid is None else asdict(grid),
            "note": method_note(match),
            "standing": score_note(match),
            "colors": color_note(match),
            "scale": scale,
        }

    def _correct(self, job: Correct) -> dict[str, Any]:
        fragments = self._read(job.corrector, job.image)
        correction = correct(job.corrector, fragments, job.text, threshold=job.threshold)
        image = self._image(job.model, job.image)

        def scores(texts: Sequence[str]) -> list[float]:
            encoded = _encode_texts(job.model, texts)
            pairs = [(0, column) for column in range(len(texts))]
            return list(_paired(job.model, image, encoded, pairs).values())

        effects = [word.effect for word in explain_encoded(job.model, image, job.text).words]
        return {
            **correction.as_dict(),
            "image": job.image,
            "threshold": correction.rule.threshold,
            "agreed": agree(correction, effects, scores).as_dict(),
        }

    def _image(self, model: Model, name: str) -> Encoded:
        """One image encoded by a model: from the index, from an upload, or from its pixels."""
        encoded = self.library.find_encoded(name, model)
        return encoded if encoded is not None else _encode_fragments(model, self._read(model, name))

    def _read(self, model: Model, name: str) -> Fragments:
        """An image's fragments, extracted from its pixels for a model."""
        self.library.check(name)
        if model.fragments_from is None:
            raise Problem(
                409, "this model was trained on precomputed features; it cannot read pixels"
            )
        extractor = model.reader.extractor
        key = (name, extractor.fingerprint())
        if key not in self._fragments:
            self._fragments[key] = extractor.extract(self.library.picture(name))
            if len(self._fragments) > FRAGMENT_CACHE_SIZE:
                self._fragments.popitem(last=False)
        return self._fragments[key]


def _encode_fragments(model: Model, fragments: Fragments) -> Encoded:
    batch = pad_fragments([fragments]).to(model.device)
    encoded = model.encode_images(batch)
    if encoded.fragments is not None and encoded.mask.shape == batch.mask.shape:
        encoded = replace(encoded, boxes=batch.boxes)  # for explanations
    return encoded


def _encode_texts(model: Model, texts: Sequence[str]) -> Encoded:
    """Encoded sentences, without the words outside the model's vocabulary."""
    return encode_texts(model, [known_text(model.text, text).text for text in texts])


def _paired(
    model: Model, images: Encoded, texts: Encoded, pairs: list[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    rows, columns = torch.tensor(pairs, device=model.device).T.contiguous()
    scores = model.matcher.paired(images[rows], texts[columns])
    if scores is None:
        scores = model.matcher(images, texts)[rows, columns]
    return dict(zip(pairs, scores.float().tolist(), strict=True))
