"""Optimisers with their parameter groups, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from counterfoil.config import OptimiserConfig, ScheduleConfig
from counterfoil.errors import ConfigError


def create_optimiser(modules: nn.Module, config: OptimiserConfig) -> Optimizer:
    """Groups: the language model at its reduced rate, everything else at the full one.

    Single numbers, such as a learned temperature, do not decay.
    """
    marked = [part for part in modules.modules() if getattr(part, "pretrained", False)]
    slow = {id(parameter) for part in marked for parameter in part.parameters()}
    trained = [p for p in modules.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("nothing to train: every parameter of the model is frozen")
    groups = [
        {"params": [p for p in trained if id(p) not in slow and p.ndim], "lr": config.lr},
        {
            "params": [p for p in trained if id(p) in slow],
            "lr": config.lr * config.language_model_factor,
        },
        {
            "params": [p for p in trained if id(p) not in slow and not p.ndim],
            "lr": config.lr,
            "weight_decay": 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.betas[0], config.betas[1])
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay)


def create_schedule(
    optimiser: Optimizer, config: ScheduleConfig, steps_per_epoch: int, epochs: int
) -> LambdaLR:
    """The schedule as a factor of the initial rate, one update at a time."""
    return LambdaLR(optimiser, rate_factor(config, steps_per_epoch, epochs))


def rate_factor(
    config: ScheduleConfig, steps_per_epoch: int, epochs: int
) -> Callable[[int], float]:
    """Factor of the learning rate at each update: linear warm-up, then the named course."""
    total = max(1, steps_per_epoch * epochs)

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.name == "constant":
            return 1.0
        if config.name == "step":
            passed = sum(step >= epoch * steps_per_epoch for epoch in config.decay_epochs)
            return float(config.factor**passed)
        left = 1.0 - (step - config.warmup_steps) / max(1, total - config.warmup_steps)
        left = min(1.0, max(0.0, left))
        return left if config.name == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))

    return factor
