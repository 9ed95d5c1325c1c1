"""The first stage: vectors of images and captions that find a shortlist for the matcher.

They are the matcher's own pooled vectors, its fragments, fixed-dimensional encodings of them, a fit
to its scores, or another model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress
from counterfoil.data.batches.collate import ImageBatch
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.encoders import Encoded
from counterfoil.matchers.ensemble import EnsembleMatcher, split_members
from counterfoil.models.model import Model, reads_the_same
from counterfoil.scoring.encode import encode_images, encode_texts, score_all
from counterfoil.search.fde import FixedEncoding, Role
from counterfoil.search.items import Side
from counterfoil.search.vectors import Vectors

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridge penalties to try, as shares of the mean eigenvalue."""

FirstStage = Literal["pooled", "fitted", "fde", "maxsim", "other"]
"""``fde``: fixed-dimensional encodings of fragments.

``other``: vectors of another model, stored beside the matcher's inputs.
"""

FirstStageOption = Literal["auto", "pooled", "fitted", "fde", "maxsim"]

SAMPLE, MIN_SAMPLE = 1024, 64
"""Most and fewest images, with one caption each, that are scored for a fit."""


# The fit is the bilinear form nearest to the scores of a matcher of fragments. With
# φ(x) = [mean of the fragments; their maximum; 1], each at unit length, a sample of scores S of
# captions with images is approximated by Φ_captions W Φ_imagesᵀ. Ridge regression gives W in closed
# form; its singular vectors turn φ of either side into vectors whose inner product is that form.
@dataclass(frozen=True)
class Fit:
    """Maps [features, dim] from φ to vectors, one per side.

    ``gain`` is its improvement over pooled vectors on held-out pairs.
    """

    images: Tensor
    captions: Tensor
    gain: float = 0.0

    def save(self, path: Path) -> None:
        maps = {"images": self.images, "captions": self.captions}
        save_file({side: x.contiguous() for side, x in maps.items()}, path)

    @classmethod
    def load(cls, path: Path) -> Fit:
        try:
            maps = load_file(path)
            return cls(maps["images"], maps["captions"])
        except (SafetensorError, OSError, KeyError) as error:
            raise DataError(f"{path}: cannot be read, build the index again ({error})") from None


def features(model: Model, encoded: Encoded) -> Tensor:
    """φ [n, features] of encoded items; members of an ensemble side by side."""
    matcher = model.matcher
    count = len(matcher.members) if isinstance(matcher, EnsembleMatcher) else 1
    parts = []
    for member in split_members(encoded, count):
        assert member.fragments is not None  # noqa: S101 - fitted only for matchers of fragments
        mask = member.mask[..., None]
        unit = F.normalize(member.fragments.float(), dim=-1) * mask
        largest = unit.masked_fill(~mask, -2.0).amax(1).masked_fill(~mask.any(1), 0.0)
        parts += [F.normalize(unit.sum(1), dim=-1), F.normalize(largest, dim=-1)]
    return torch.cat([*parts, torch.ones_like(parts[0][:, :1])], dim=1)


def solve(captions: Tensor, images: Tensor, scores: Tensor, pooled: Tensor, dim: int) -> Fit:
    """The fit with the penalty that does best on a fifth of both sides, held out.

    ``scores`` [captions, images] are the matcher's, ``pooled`` those of pooled vectors.
    """
    seen = max(1, len(captions) * 4 // 5)
    ridge = _Ridge(captions[:seen], images[:seen], scores[:seen, :seen])
    held_out = scores[seen:, seen:]
    guesses = {
        penalty: captions[seen:] @ ridge.form(penalty) @ images[seen:].T for penalty in PENALTIES
    }
    best = max(
        PENALTIES,
        key=lambda p: float(
            _correlation(guesses[p], held_out) + _correlation(guesses[p].T, held_out.T)
        ),
    )
    form = _Ridge(captions, images, scores).form(best)
    left, values, right = torch.linalg.svd(form, full_matrices=False)
    roots = values[:dim].sqrt()
    gain = _share_found(guesses[best], held_out) - _share_found(pooled[seen:, seen:], held_out)
    return Fit((right[:dim].T * roots).float(), (left[:, :dim] * roots).float(), gain)


def _share_found(guess: Tensor, truth: Tensor) -> float:
    """Share of the best twentieth of each row and column among the best tenth of the guess."""
    shares = []
    for one, other in ((guess, truth), (guess.T, truth.T)):
        few = max(1, one.shape[1] // 20)
        edge = one.topk(2 * few, dim=1).values[:, -1:]
        best = other.topk(few, dim=1).indices
        shares.append((one.gather(1, best) >= edge).double().mean())
    return float(sum(shares)) / 2


class _Ridge:
    """(CᵀC + λ)⁻¹ CᵀS I (IᵀI + λ)⁻¹ for many λ at the cost of one."""

    def __init__(self, captions: Tensor, images: Tensor, scores: Tensor) -> None:
        self.of_captions = torch.linalg.eigh(captions.T @ captions)
        self.of_images = torch.linalg.eigh(images.T @ images)
        self.core = self.of_captions[1].T @ (captions.T @ scores @ images) @ self.of_images[1]

    def form(self, penalty: float) -> Tensor:
        rows, columns = (
            values.clamp(min=0) + penalty * values.mean()
            for values, _ in (self.of_captions, self.of_images)
        )
        inner = self.core / rows[:, None] / columns[None]
        return self.of_captions[1] @ inner @ self.of_images[1].T


def _correlation(guess: Tensor, truth: Tensor) -> Tensor:
    """Mean over rows of the correlation of a row with its counterpart."""
    one, other = (x - x.mean(1, keepdim=True) for x in (guess, truth))
    return F.cosine_similarity(one, other, dim=1).mean()


@dataclass(frozen=True)
class FirstStageProxy:
    """Turns the matcher's inputs into first-stage vectors."""

    model: Model
    form: FirstStage
    fit: Fit | None = None
    fde: FixedEncoding | None = None

    @torch.inference_mode()
    def vectors(self, encoded: Encoded, side: Side, role: Role = "item") -> Vectors:
        """Vectors of items of an index, or of queries, which only "fde" encodes differently."""
        if self.form == "other":
            return self.same_side_vectors(encoded)
        if self.form == "pooled":
            return pooled_vectors(self.model, encoded)
        if self.form == "maxsim":
            return fragment_vectors(self.model, encoded)
        if self.form == "fde":
            assert self.fde is not None  # noqa: S101 - an index with this form has one
            fragments = _side_by_side(self.model, encoded, _unit)
            return Vectors.single(self.fde.encode(fragments, encoded.mask, role).cpu().numpy())
        assert self.fit is not None  # noqa: S101 - an index with this form has one
        to = self.fit.images if side == "images" else self.fit.captions
        return Vectors.single((features(self.model, encoded).cpu() @ to).numpy())

    @torch.inference_mode()
    def same_side_vectors(self, encoded: Encoded) -> Vectors:
        """Vectors whose inner product is the similarity of two items of one side."""
        if self.form != "other":
            return pooled_vectors(self.model, encoded)
        assert encoded.pooled is not None  # noqa: S101 - `ItemEncoder` put it there
        return Vectors.single(F.normalize(encoded.pooled.float(), dim=-1).cpu().numpy())


@torch.inference_mode()
def pooled_vectors(model: Model, encoded: Encoded) -> Vectors:
    """One vector per item, at unit length.

    It is the matcher's own pooled vector if it has one, else the mean of the unit-length fragments.
    The vectors of an ensemble's members are concatenated, so that an inner product is their mean.
    """

    def member(one: Encoded) -> Tensor:
        if one.pooled is not None:
            return F.normalize(one.pooled.float(), dim=-1)
        return F.normalize(_unit(one).sum(1), dim=-1)

    return Vectors.single(_side_by_side(model, encoded, member).cpu().numpy())


@torch.inference_mode()
def fragment_vectors(model: Model, encoded: Encoded) -> Vectors:
    """One vector per fragment, for MaxSim."""
    values = _side_by_side(model, encoded, _unit)
    mask = encoded.mask.clone()
    mask[:, 0] |= ~mask.any(1)  # an item without fragments has one that is zero
    lengths = mask.sum(1).cpu().numpy().astype(np.int64)
    return Vectors(values[mask].cpu().numpy(), lengths)


@torch.inference_mode()
def fragment_dim(encoder: ItemEncoder) -> int:
    """Numbers of a fragment vector."""
    return int(fragment_vectors(encoder.model, encoder.texts(["a"])).rows.shape[1])


def choose_form(option: FirstStageOption, model: Model, can_fit: bool) -> FirstStage:
    """ "auto" is pooled for models of whole vectors and fitted for others, given data to fit on."""
    whole = model.matcher.needs == "pooled"
    if option == "auto":
        return "pooled" if whole or not can_fit else "fitted"
    if whole and option != "pooled":
        raise DataError(
            f"the model '{model.spec.name}' compares whole vectors and has no fragments for a "
            f"first stage '{option}': use --first-stage pooled, which is exact"
        )
    return option


def _side_by_side(model: Model, encoded: Encoded, make: Callable[[Encoded], Tensor]) -> Tensor:
    matcher = model.matcher
    count = len(matcher.members) if isinstance(matcher, EnsembleMatcher) else 1
    parts = [make(member) for member in split_members(encoded, count)]
    return torch.cat(parts, dim=-1) / count**0.5


def _unit(encoded: Encoded) -> Tensor:
    assert encoded.fragments is not None  # noqa: S101 - `choose_form` saw to it
    return F.normalize(encoded.fragments.float(), dim=-1) * encoded.mask[..., None]


def enough_to_fit(splits: Sequence[Split]) -> bool:
    return sum(1 for split in splits for texts in split.captions if texts) >= MIN_SAMPLE


@torch.inference_mode()
def fit_first_stage(model: Model, splits: Sequence[Split], dim: int, progress: Progress) -> Fit:
    """Score a sample of captions with a sample of images, and fit."""
    rng = np.random.default_rng(0)
    captioned = [
        (split, image)
        for split in splits
        for image, texts in enumerate(split.captions)
        if len(texts)
    ]
    if len(captioned) < MIN_SAMPLE:
        raise DataError(f"a fitted first stage needs {MIN_SAMPLE} images with captions: use pooled")
    chosen = rng.permutation(len(captioned))[:SAMPLE]
    images, texts = [], []
    for split in splits:
        here = [captioned[i][1] for i in chosen if captioned[i][0] is split]
        if here:
            part = split.select(here)
            encoded, readable, _ = encode_images(model, part, progress=progress)
            images.append(encoded)
            texts += [part.captions[i][int(rng.integers(len(part.captions[i])))] for i in readable]
    # Shuffled, so that the held-out part comes from all splits.
    order = torch.from_numpy(rng.permutation(len(texts)))
    image_items = Encoded.cat(images)[order.to(model.device)]
    text_items = encode_texts(model, [texts[i] for i in order.tolist()])
    scores = score_all(model, image_items, text_items, progress).T.double()
    text_features, image_features = (
        features(model, side).double().cpu() for side in (text_items, image_items)
    )
    pooled = pooled_vectors(model, text_items).rows @ pooled_vectors(model, image_items).rows.T
    return solve(
        text_features,
        image_features,
        scores - scores.mean(),
        torch.from_numpy(pooled).double(),
        dim,
    )


# A cross-encoder has no vectors for a shortlist, as it encodes pairs. A faster model's vectors are
# then stored as ``pooled``.
@dataclass(frozen=True)
class ItemEncoder:
    """Encodes with the model of an index and, if it has one, its first-stage model."""

    model: Model
    first: Model | None = None

    def texts(self, texts: Sequence[str]) -> Encoded:
        """Encoded sentences; words unknown to a model are removed first."""
        encoded = encode_texts(self.model, _known_texts(self.model, texts))
        if self.first is None:
            return encoded
        return _with_vectors(
            encoded, self.first, encode_texts(self.first, _known_texts(self.first, texts))
        )

    @torch.inference_mode()
    def images(self, batch: ImageBatch) -> Encoded:
        """Encoded images, with their boxes for explanations."""
        batch = batch.to(self.model.device)
        encoded = self.model.encode_images(batch)
        if encoded.fragments is not None and encoded.mask.shape == batch.mask.shape:
            encoded = replace(encoded, boxes=batch.boxes)
        if self.first is None:
            return encoded
        return _with_vectors(
            encoded, self.first, self.first.encode_images(batch.to(self.first.device))
        )


def _known_texts(model: Model, texts: Sequence[str]) -> list[str]:
    return [known_text(model.text, text).text for text in texts]


def _with_vectors(encoded: Encoded, first: Model, other: Encoded) -> Encoded:
    vectors = torch.from_numpy(pooled_vectors(first, other).rows)
    return replace(encoded, pooled=vectors.to(encoded.mask.device))


def check_first(model: Model, first: Model) -> None:
    """Refuse two models that cannot search together, with the reason."""
    if model.matcher.needs != "fragments":
        raise ConfigError(
            f"the model '{model.spec.name}' compares whole vectors, which are its own first stage: "
            "leave --retriever out"
        )
    if first.matcher.needs != "pooled":
        raise ConfigError(
            f"--retriever: the model '{first.spec.name}' has no whole vectors to find a shortlist "
            "with; name a run of a model that compares them, such as vse-infty or rvse-mlp"
        )
    if not reads_the_same(model, first):
        raise ConfigError(
            f"--retriever: '{first.spec.name}' reads fragments of "
            f"'{first.fragments_name or 'precomputed features'}' ({first.input_dim} numbers), "
            f"'{model.spec.name}' those of '{model.fragments_name or 'precomputed features'}' "
            f"({model.input_dim} numbers): train both on the same features"
        )
