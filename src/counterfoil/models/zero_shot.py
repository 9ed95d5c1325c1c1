"""CLIP and SigLIP as models that need no training: a folder or a hub's name is enough."""

from __future__ import annotations

from pathlib import Path

from counterfoil.core.config import MODEL_CONFIG
from counterfoil.data.text.tokenizers import HuggingFaceText
from counterfoil.features.pixels import Pixels
from counterfoil.features.pretrained import dual_config
from counterfoil.models.model import Model
from counterfoil.models.spec import ModelSpec
from counterfoil.models.store import SUMS


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder was written by `transformers`, not by `save_pretrained`."""
    return (folder / MODEL_CONFIG).is_file() and not (folder / SUMS).is_file()


def load_zero_shot(name: str) -> Model:
    """A dual encoder of `transformers` as it was published, compared by cosines."""
    config = dual_config(name)
    clip = config.model_type == "clip"
    width = config.projection_dim if clip else config.vision_config.hidden_size
    half = {"name": "dual", "pretrained": name}
    spec = ModelSpec(
        name=config.model_type,
        embed_size=int(width),
        image=half,
        text=half,
        matcher={"name": "cosine"},
    )
    pixels = Pixels(model=name)
    text = HuggingFaceText.from_pretrained(name)
    return Model(spec, pixels.dim, text, fragments_from=pixels.description()).eval()
