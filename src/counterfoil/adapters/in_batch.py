"""Base class of the losses for other trainers: an objective over the scores of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.matchers.fragment_matcher import single, single_precision
from counterfoil.objectives import Context, create_objective
from counterfoil.objectives.base import at_least_float32
from counterfoil.objectives.composite import Composite
from counterfoil.objectives.positives import Ids, check_scores

Spec = str | Mapping[str, Any]


class InBatchLoss(nn.Module):
    """An objective by name or configuration, as in a recipe, over the scores of a batch of pairs.

    Pair ``k`` is image ``k`` with text ``k``. Pairs with the same image id are positives; a text
    identical to one of the image's own is never its negative. For the schedules of objectives, an
    epoch has ``steps_per_epoch`` training steps; 0: all steps belong to the first epoch.
    """

    def __init__(self, objective: Spec = "hardest", steps_per_epoch: int = 0) -> None:
        super().__init__()
        self.objective = _create_scores_only(objective)
        self.spec: Spec = objective if isinstance(objective, str) else dict(objective)
        if not isinstance(steps_per_epoch, int | np.integer) or steps_per_epoch < 0:
            raise ArgumentError(
                f"steps_per_epoch: expected a whole number of at least 0, got {steps_per_epoch!r}"
            )
        self.steps_per_epoch, self.step = steps_per_epoch, 0
        self.register_load_state_dict_pre_hook(_add_missing_step)

    def get_extra_state(self) -> Tensor:
        """The step, as part of `state_dict`, so that a resumed loop continues its schedules."""
        return torch.tensor(self.step)

    def set_extra_state(self, state: Tensor) -> None:
        self.step = int(state)

    def of_scores(self, scores: Tensor, image_ids: Ids, text_ids: Ids) -> Tensor:
        """The loss of scores [B, B]; equal ids [B] mark equal images and equal texts."""
        check_scores(scores)
        if scores.shape[0] != scores.shape[1]:
            raise ArgumentError(
                f"scores: expected one text per image [B, B], got shape {list(scores.shape)}"
            )
        image_ids = read_ids(image_ids, scores, "image_ids")
        text_ids = read_ids(text_ids, scores, "text_ids")
        pairs = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        positives = pairs | (image_ids[:, None] == image_ids)
        protected = None
        if self.objective.protects_identical:
            protected = _has_text(image_ids, text_ids) & ~positives
        context = Context(
            epoch=self.step // self.steps_per_epoch if self.steps_per_epoch else 0,
            step=self.step,
            protected=protected,
            logging=False,
        )
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return self.objective.compute(at_least_float32(scores), positives, context).loss


def check_features(images: object, texts: object) -> None:
    """Refuse what are no vectors of pairs [B, D]; half and single precision may be mixed."""
    for name, rows in (("images", images), ("texts", texts)):
        if not isinstance(rows, Tensor):
            raise ArgumentError(f"features of {name}: expected a tensor, got {type(rows).__name__}")
        if rows.ndim != 2 or not rows.is_floating_point():
            got = f"{rows.dtype} {list(rows.shape)}"
            raise ArgumentError(f"features of {name}: expected vectors [B, D], got {got}")
    assert isinstance(images, Tensor) and isinstance(texts, Tensor)  # noqa: S101, PT018
    mixed = single(images).dtype != single(texts).dtype
    if mixed or images.shape[1] != texts.shape[1]:
        both = " and ".join(f"{one.dtype} {list(one.shape)}" for one in (images, texts))
        raise ArgumentError(f"features: expected vectors of one width and precision, got {both}")


def cosines(images: Tensor, texts: Tensor) -> Tensor:
    """Inner products [n_images, n_texts] of unit vectors, in float32 under autocast, too.

    In half precision, scores of hard negatives would be rounded to those of their positives.
    """
    with single_precision(images.device):
        return single(images) @ single(texts).T


def _add_missing_step(loss: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """States that were saved without a step can be loaded; the step stays as it is."""
    state.setdefault(f"{prefix}_extra_state", loss.get_extra_state())


def _create_scores_only(spec: Spec) -> Composite:
    objective = create_objective(spec)
    for name, term in objective.each():
        if term.requires or not term.needs_scores or term.ensemble_size > 1 or term.held_out:
            raise ConfigError(
                f"objective '{name}' reads more than the scores of a batch, so it trains with "
                "`counterfoil train` only; objectives of scores: triplet, hardest, selhn …"
            )
    if objective.protection is not None and objective.protection.is_heuristic:
        raise ConfigError(
            "objective 'protect' with captions or images reads a whole training split, so it works "
            "with `counterfoil train` only; here, pairs with equal image_ids are protected"
        )
    return objective


def _has_text(image_ids: Tensor, text_ids: Tensor) -> Tensor:
    """Whether the image of each row [B] has the text of each column in any of the pairs [B]."""
    same_image = (
        image_ids[:, None] == image_ids
    ).float()  # a product: `unique` would wait for a GPU
    return same_image @ (text_ids[:, None] == text_ids).float() > 0


EXACT = 2**53
"""Up to here, every whole number is one in double precision."""


def read_ids(ids: Ids, rows: Tensor, name: str) -> Tensor:
    """Ids [B] of rows [B, ...] as a tensor; names are hashed, equally on all processes."""
    values: Any = ids
    if isinstance(ids, (list, tuple, np.ndarray)) and all(isinstance(one, str) for one in ids):
        values = [_hash_name(str(one)) for one in ids]
    if isinstance(ids, (list, tuple)) and any(isinstance(one, float) for one in ids):
        exact = all(isinstance(one, Real) and not abs(float(one)) > EXACT for one in ids)
        # in single precision, large ids would be equal
        values = np.asarray(ids, dtype=np.float64) if exact else None
    try:
        tensor = torch.as_tensor(values, device=rows.device)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.dtype == torch.bool or tensor.shape != rows.shape[:1]:
        given = type(ids).__name__ if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise ArgumentError(
            f"{name}: expected {len(rows)} numbers or names, one per pair, got {given}"
        )
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise ArgumentError(f"{name}: an id is NaN, which equals no id, not even itself")
    return tensor


def _hash_name(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def row_ids(rows: Tensor) -> Tensor:
    """Ids [B] that are equal for equal rows [B, ...], on all processes and for any padding.

    A row is hashed to 64 bits as a weighted sum, with a fixed random weight per column; zeros
    (padding) do not contribute.
    """
    flat = rows.detach().flatten(1)
    if flat.is_floating_point():
        flat = flat.float().contiguous().view(torch.int32)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator) * 2 + 1
    return (flat.long() * weights.to(flat.device)).sum(1)
