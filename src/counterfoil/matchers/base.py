"""`Matcher`: two encoded batches to a score matrix."""

from __future__ import annotations

from torch import Tensor, nn

from counterfoil.encoders.encoded import Encoded, Needs
from counterfoil.errors import ConfigError
from counterfoil.registry import Registry

matchers: Registry[type[Matcher]] = Registry("matcher")


class Matcher(nn.Module):
    """Scores [n_images, n_texts] of every image with every text.

    Any two batch sizes, any lengths; padding never changes a score. ``needs`` says what it reads of
    an `Encoded`, so that nothing else is kept or sent.
    """

    needs: Needs = "fragments"

    def __init__(self, embed_size: int) -> None:
        super().__init__()
        self.embed_size = embed_size

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        raise NotImplementedError


def pooled(encoded: Encoded, side: str) -> Tensor:
    if encoded.pooled is None:
        raise ConfigError(
            f"this matcher compares whole vectors, but the {side} encoder does not pool: "
            f"set model.{side}.pooling (mean, max, kmax, attention, gpo)"
        )
    return encoded.pooled
