"""Named compositions of encoders and matchers, and their folders on disk."""

from counterfoil.models.catalogue import ModelSpec, models, resolve
from counterfoil.models.model import Model, create_model
from counterfoil.models.store import from_pretrained, save_pretrained

__all__ = [
    "Model",
    "ModelSpec",
    "create_model",
    "from_pretrained",
    "models",
    "resolve",
    "save_pretrained",
]
