"""The outputs of detectors of DETR's family as regions: the most certain queries of each image."""

from __future__ import annotations

from typing import Any

import numpy as np

from counterfoil.features.backbone import Seen, to_array

_LEAST_SIDE = 1e-3


def best_detections(made: Any, top: int, labels: int) -> Seen:
    """The ``top`` queries by certainty: their last states with their boxes.

    Detectors with a class for "nothing" share their certainty among all classes; the later ones
    judge each class by itself.
    """
    import torch

    logits = made.logits.float()
    if logits.shape[-1] > labels:
        certainty = torch.softmax(logits, dim=-1)[..., :-1].amax(dim=-1)
    else:
        certainty = torch.sigmoid(logits).amax(dim=-1)
    queries = certainty.shape[1]
    best = certainty.topk(min(top, queries), dim=1).indices
    # Where patches come along, as in YOLOS, the queries are the last tokens.
    states = made.last_hidden_state[:, -queries:]
    features = torch.gather(states, 1, best[..., None].expand(-1, -1, states.shape[-1]))
    boxes = torch.gather(made.pred_boxes, 1, best[..., None].expand(-1, -1, 4))
    return Seen(to_array(features), corners(to_array(boxes)))


def corners(boxes: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Centre and size to x1, y1, x2, y2, inside the picture and never without extent.

    >>> corners(np.array([[0.5, 0.5, 0.5, 2.0]], np.float32)).tolist()
    [[0.25, 0.0, 0.75, 1.0]]
    """
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    low = np.clip(centre - half, 0, 1 - _LEAST_SIDE)
    high = np.maximum(np.clip(centre + half, 0, 1), low + _LEAST_SIDE)
    return np.concatenate([low, high], axis=-1).astype(np.float32)
