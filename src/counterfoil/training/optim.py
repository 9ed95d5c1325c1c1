"""Optimizers with parameter groups, learning-rate schedules, warm-ups, and the update step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from counterfoil.core.config import OptimizerConfig, ScheduleConfig, TrainConfig
from counterfoil.core.errors import ConfigError, DivergedError, TrainingError
from counterfoil.encoders.bert import pretrained_ids
from counterfoil.encoders.dual import Tower
from counterfoil.objectives import Objective

NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)

PRETRAINED_FACTOR = 0.1
"""Default factor of the learning rate for pretrained parameters."""


def create_optimizer(modules: nn.Module, config: OptimizerConfig) -> Optimizer:
    """An optimizer with pretrained parameters at a reduced rate and the others at the full rate.

    Scalars, such as a learned temperature, have no weight decay; with ``no_decay``, neither have
    biases and the parameters of normalizations.
    """
    trained = [p for p in modules.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("nothing to train: every parameter of the model is frozen")
    slow = _rate_factors(modules, config)
    exempt_ids = norms_and_biases(modules) if config.no_decay else set()
    exempt_ids |= {id(p) for p in trained if id(p) not in slow and not p.ndim}
    rates = {None: config.lr} | {
        factor: config.lr * factor for factor in sorted(set(slow.values()), reverse=True)
    }
    groups = [
        {
            "params": [
                p for p in trained if slow.get(id(p)) == factor and (id(p) in exempt_ids) == exempt
            ],
            "lr": rate,
            **({"weight_decay": 0.0} if exempt else {}),
        }
        for exempt in (False, True)
        for factor, rate in rates.items()
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.betas[0], config.betas[1])
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    # one fused kernel if all parameters are on a GPU, otherwise PyTorch's choice
    fused = True if all(p.is_cuda and p.is_floating_point() for p in trained) else None
    return kind(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=fused)


def norms_and_biases(modules: nn.Module) -> set[int]:
    """Ids of all biases and of all parameters of normalizations."""
    return {
        id(parameter)
        for part in modules.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if isinstance(part, NORMS) or name.startswith("bias")
    }


def _rate_factors(modules: nn.Module, config: OptimizerConfig) -> dict[int, float]:
    """Factors of the learning rate by parameter id, for pretrained parameters and by depth.

    Parameters at the full rate are omitted.
    """
    pretrained, factor = pretrained_ids(modules), config.pretrained_lr_factor
    if factor is None:
        factor = PRETRAINED_FACTOR
    elif factor != 1.0 and not pretrained:
        raise ConfigError(
            f"train.optimizer.pretrained_lr_factor={factor:g}: no parameter of this model was "
            "loaded from pretrained weights, so there is nothing to slow down: remove it, or give "
            "the model a pretrained part (model.text.pretrained, model.matcher.pretrained)"
        )
    factors = dict.fromkeys(pretrained, factor)
    for part in modules.modules():
        if not isinstance(part, Tower):
            continue
        for name, parameter in part.named_parameters():
            factors[id(parameter)] = factors.get(id(parameter), 1.0) * part.rate_factor(name)
    return factors


def create_schedule(
    optimizer: Optimizer, config: ScheduleConfig, steps_per_epoch: int, epochs: int
) -> LambdaLR:
    """The schedule as a factor of the initial rate per update."""
    return LambdaLR(optimizer, rate_factor(config, steps_per_epoch, epochs))


def rate_factor(
    config: ScheduleConfig, steps_per_epoch: int, epochs: int
) -> Callable[[int], float]:
    """Factor of the learning rate per update: linear warm-up, then the named schedule."""
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


def warmup_warnings(config: TrainConfig, objective: Objective, per_epoch: int) -> list[str]:
    """Warm-ups of the learning rate and of the objective that last as long as the run."""
    steps, warmup = per_epoch * config.epochs, config.schedule.warmup_steps
    warnings = objective.never_reached(config.epochs, per_epoch)
    if warmup and warmup >= steps:
        warnings.append(
            f"train.schedule.warmup_steps={warmup}: the learning rate rises to the end, to "
            f"{steps / warmup:.0%} of train.optimizer.lr"
        )
    length = f"this run has {_count(config.epochs, 'epoch')} of {_count(per_epoch, 'update')}"
    return [f"{warning} ({length})" for warning in warnings]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def as_numbers(*tensors: Tensor) -> list[float]:
    """Values of single-number tensors, with one host sync for all."""
    numbers: list[float] = torch.stack([tensor.detach() for tensor in tensors]).tolist()
    return numbers


class OptimizerStep:
    """Optimizer, schedule and gradient scaler (fp16); ``batches`` is the number per epoch."""

    def __init__(
        self, module: nn.Module, config: TrainConfig, batches: int, device: torch.device
    ) -> None:
        self.module, self.clip = module, config.optimizer.clip
        # found once: finding them in every step takes longer than summing their squares
        self.parameters = list(module.parameters())
        self.optimizer = create_optimizer(module, config.optimizer)
        self.per_epoch = per_epoch = -(-batches // config.accumulate)
        self.schedule = create_schedule(self.optimizer, config.schedule, per_epoch, config.epochs)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on the model, so there is nothing to learn: is an "
                "objective of your own detached from the scores?"
            )
        self.scaler.scale(loss).backward()

    def unscale(self) -> None:
        """Unscale the gradients; call once, before `gradient_norm`."""
        self.scaler.unscale_(self.optimizer)

    def gradient_norm(self) -> Tensor:
        """Norm of the gradient before clipping, which `step` does."""
        return nn.utils.get_total_norm(self._gradients())

    def step(self, norm: float, number: int) -> None:
        """Clip the gradient of the given norm, update the parameters, advance the schedule."""
        if not math.isfinite(norm) and not self.scaler.is_enabled():
            raise DivergedError(
                f"step {number}: the gradient is not a finite number ({self._nonfinite()}), the "
                "update was not made; lower train.optimizer.lr or use train.precision=float32"
            )
        share = self.clip / (norm + 1e-6) if self.clip else 1.0
        if share < 1.0:
            torch._foreach_mul_(self._gradients(), share)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.get_scale() >= scale:  # otherwise fp16 overflowed and the update was skipped
            self.schedule.step()

    def _nonfinite(self) -> str:
        """The first parameter whose gradient is not finite, and how many there are."""
        trained = [(n, p.grad) for n, p in self.module.named_parameters() if p.grad is not None]
        broken = [name for name, gradient in trained if not gradient.isfinite().all()]
        if not broken:  # each is finite, but their sum of squares overflows
            return "too large to add up"
        first = broken[0].removeprefix("model.")
        return f"in {len(broken)} of {len(trained)} parameters, first {first}"

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # ``fused`` must be that of this machine: an optimizer that was created for fused steps
        # fails with scaled losses if a loaded state turns them off
        saved, fused = state["optimizer"], self.optimizer.param_groups[0].get("fused")
        groups = [{**group, "fused": fused} for group in saved["param_groups"]]
        self.optimizer.load_state_dict({**saved, "param_groups": groups})
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
