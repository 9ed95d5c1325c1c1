"""What a loss does to the parameters: gradients, clipping, the optimiser's step, the rate's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.config import TrainConfig
from counterfoil.errors import TrainingError
from counterfoil.training.optimiser import create_optimiser, create_schedule


class Updates:
    """Optimiser, schedule and the scaling of losses that half precision needs, as one."""

    def __init__(
        self, module: nn.Module, config: TrainConfig, per_epoch: int, device: torch.device
    ) -> None:
        self.module, self.clip = module, config.optimiser.clip
        self.optimiser = create_optimiser(module, config.optimiser)
        self.schedule = create_schedule(self.optimiser, config.schedule, per_epoch, config.epochs)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    @property
    def rate(self) -> float:
        return float(self.optimiser.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self) -> None:
        """Gradients in their own units; call once, before `gradient_norm`."""
        self.scaler.unscale_(self.optimiser)

    def gradient_norm(self) -> Tensor:
        """Norm of the gradient before it is clipped; `step` does that, knowing the norm."""
        return nn.utils.get_total_norm(self._gradients())

    def step(self, norm: float, number: int) -> None:
        """Move the parameters by a gradient of this norm, clipped, and the learning rate."""
        if not math.isfinite(norm) and not self.scaler.is_enabled():
            raise TrainingError(
                f"step {number}: the gradient is not a finite number ({self._broken()}), the "
                "update was not made; lower train.optimiser.lr or use train.precision=float32"
            )
        share = self.clip / (norm + 1e-6) if self.clip else 1.0
        if share < 1.0:
            torch._foreach_mul_(self._gradients(), share)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        if self.scaler.get_scale() >= scale:  # else fp16 overflowed and the update was left out
            self.schedule.step()

    def _broken(self) -> str:
        """Where it is not: the first of the parameters, and how many there are."""
        trained = [(n, p.grad) for n, p in self.module.named_parameters() if p.grad is not None]
        broken = [name for name, gradient in trained if not gradient.isfinite().all()]
        if not broken:  # each is finite, and their squares add up to more than there is
            return "too large to add up"
        first = broken[0].removeprefix("model.")
        return f"in {len(broken)} of {len(trained)} parameters, first {first}"

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # which kernel steps is this machine's choice, not that of the one that saved: an optimiser
        # that was made for fused steps, and is told otherwise, fails as soon as losses are scaled
        saved, fused = state["optimiser"], self.optimiser.param_groups[0].get("fused")
        groups = [{**group, "fused": fused} for group in saved["param_groups"]]
        self.optimiser.load_state_dict({**saved, "param_groups": groups})
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
