"""Choice of the device that models run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterfoil.errors import ConfigError

if TYPE_CHECKING:
    import torch


def choose_device(name: str) -> torch.device:
    """The device asked for; 'auto' takes this process's GPU if there is one."""
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}': expected auto, cpu, cuda or cuda:0 …") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}': no CUDA device can be used here")
    return device
