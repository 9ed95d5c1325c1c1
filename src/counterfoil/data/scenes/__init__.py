"""Drawn scenes: a synthetic data set with ground truth for every word, made by code."""

from counterfoil.data.scenes.captions import describe
from counterfoil.data.scenes.draw import draw
from counterfoil.data.scenes.falsify import Foil, alternatives, false_scene, falsify
from counterfoil.data.scenes.family import make_scene
from counterfoil.data.scenes.scene import Edit, Relation, Scene, SceneObject
from counterfoil.data.scenes.store import load_scenes
from counterfoil.data.scenes.truth import (
    SceneCaption,
    Statement,
    Word,
    captions_of,
    could_be_true,
    is_true,
    scene_of,
    statement_of,
    tokens,
)

__all__ = [
    "Edit",
    "Foil",
    "Relation",
    "Scene",
    "SceneCaption",
    "SceneObject",
    "Statement",
    "Word",
    "alternatives",
    "captions_of",
    "could_be_true",
    "describe",
    "draw",
    "false_scene",
    "falsify",
    "is_true",
    "load_scenes",
    "make_scene",
    "scene_of",
    "statement_of",
    "tokens",
]
