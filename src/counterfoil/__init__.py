"""Counterfoil: image–text matching, trained with better negatives.

An objective in your own training loop, and a matcher on your own tensors:

>>> import counterfoil as cf
>>> import torch
>>> scores = torch.tensor([[0.6, 0.5, 0.1], [0.3, 0.7, 0.2], [0.0, 0.1, 0.4]], requires_grad=True)
>>> loss = cf.objectives.SelHN(margin=0.2)(scores, image_ids=["a.jpg", "b.jpg", "c.jpg"])
>>> loss.backward()
>>> regions, words = torch.randn(2, 36, 64), torch.randn(3, 8, 64)  # 2 images, 3 texts
>>> cf.matchers.NAAF()(regions, words, text_mask=torch.ones(3, 8, dtype=torch.bool)).shape
torch.Size([2, 3])

A model from data to scores, here a tiny one on drawn scenes:

>>> import tempfile
>>> from PIL import Image
>>> folder = tempfile.mkdtemp()
>>> pairs = cf.load_pairs("scenes", images=60, cache_dir=folder)
>>> model = cf.create("naaf", pairs, embed_size=16)
>>> run = cf.train(model, pairs, objective="selhn", epochs=1, folder=f"{folder}/run")
>>> evaluation = cf.evaluate(model, pairs.test).to_markdown()
>>> model = cf.load(f"{folder}/run")
>>> Image.new("RGB", (96, 96), "red").save(f"{folder}/a.jpg")
>>> model.score([f"{folder}/a.jpg", Image.new("RGB", (64, 96))], ["a dog", "a cat"]).shape
torch.Size([2, 2])
>>> texts, images = model.encode_texts(["a dog"]), model.encode_images([f"{folder}/a.jpg"])
>>> [word.word for word in model.explain(f"{folder}/a.jpg", "a dog near a tree").words]
['a', 'dog', 'near', 'a', 'tree']
>>> cf.list_models("sc*")
['scan', 'scan-i2t', 'scan-t2i']
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterfoil import data, encoders, evaluation, features, matchers, models, objectives
    from counterfoil.api import (
        build_index,
        create,
        list_matchers,
        list_models,
        list_objectives,
        list_pretrained,
        load,
        load_pairs,
        maxsim,
        open_index,
        push_to_hub,
        train,
    )
    from counterfoil.evaluation.evaluate import evaluate
    from counterfoil.models import from_pretrained, save_pretrained


__version__ = "0.1.0"

SUBMODULES = ("data", "encoders", "evaluation", "features", "matchers", "models", "objectives")

__all__ = [
    "build_index",
    "create",
    "data",
    "encoders",
    "evaluate",
    "evaluation",
    "features",
    "from_pretrained",
    "list_matchers",
    "list_models",
    "list_objectives",
    "list_pretrained",
    "load",
    "load_pairs",
    "matchers",
    "maxsim",
    "models",
    "objectives",
    "open_index",
    "push_to_hub",
    "save_pretrained",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load the API or a submodule, and with it torch, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'counterfoil' has no attribute '{name}'")
    # As the commands do: threads that wait by spinning slow each other down beside other programs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if name in SUBMODULES:
        return importlib.import_module(f"counterfoil.{name}")
    return getattr(importlib.import_module("counterfoil.api"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "__doc__", "__name__", "__file__", "__path__"])
