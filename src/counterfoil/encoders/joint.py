"""The way into the joint space that all encoders share."""

from __future__ import annotations

from torch import Tensor, nn

from counterfoil.data.on_host import surely_whole
from counterfoil.encoders.encoded import Encoded, l2_normalise
from counterfoil.encoders.pooling import Pooling, create_pooling


def xavier_linear(inputs: int, outputs: int) -> nn.Linear:
    """Uniform in ±√6/√(in+out), bias zero: the initialisation of all public implementations."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class JointSpace(nn.Module):
    """The last step of every encoder: pool the fragments, bring them to unit length.

    ``pooling="none"`` is for matchers that read fragments; then those are normalised instead.
    ``absolute`` takes absolute values (order embeddings live in the positive quadrant).
    """

    def __init__(
        self, embed_size: int, pooling: Pooling, normalise: bool = True, absolute: bool = False
    ) -> None:
        super().__init__()
        self.pool = create_pooling(pooling, embed_size)
        self.normalise, self.absolute = normalise, absolute

    def forward(self, fragments: Tensor, mask: Tensor) -> Encoded:
        pooled = self.finish(self.pool(fragments, mask)) if self.pool is not None else None
        if self.pool is None:
            fragments = self.finish(fragments)
        if not surely_whole(mask):
            fragments = fragments.masked_fill(~mask[..., None], 0.0)
        return Encoded(fragments, mask, pooled)

    def finish(self, x: Tensor) -> Tensor:
        x = l2_normalise(x) if self.normalise else x
        return x.abs() if self.absolute else x
