"""The precision that products are computed in."""

from __future__ import annotations

import torch


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of a product of tensors of ``dtype``: autocast computes float32 in half."""
    if dtype == torch.float32 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype
