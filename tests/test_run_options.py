"""Every key of a run's configuration is read, and those with a cheap effect are seen to have it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import counterfoil
from counterfoil.core.config import RunConfig, apply_override, build_config
from counterfoil.data.pairs import Pairs
from counterfoil.models import create_model
from counterfoil.training.run_data import with_noise
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split

SOURCE = Path(counterfoil.__file__).parent
BASE = [
    *("model.name=vse-fc", "model.embed_size=8", "model.text.word_dim=6", "data.min_count=1"),
    *("train.epochs=2", "train.batch_size=10", "train.log_every=1", "train.optimizer.lr=0.01"),
]
DECAY = "train.schedule.decay_epochs=[1]"
STILL = "train.optimizer.lr=1e-12"

EFFECTS: dict[str, list[str]] = {
    "seed=1": [],
    "data.captions=one": [],
    "data.captions=grouped": [],
    "data.views=2": [],
    "data.noise=0.9": [],
    "data.min_count=9": [],
    "data.drop_regions=0.4": [],
    "data.drop_regions_varying=true": ["data.drop_regions=0.4"],
    "data.word_noise=0.5": [],
    "model.name=vse-mlp": [],
    "model.embed_size=12": [],
    "model.ensemble_size=2": [],
    "model.image.weight_norm=true": [],
    "model.text.word_dim=4": [],
    "model.matcher.name=order": [],
    "objective=triplet": [],
    "train.epochs=1": [],
    "train.batch_size=7": [],
    "train.accumulate=2": [],
    "train.drop_last=false": [],
    "train.optimizer.name=adam": ["train.optimizer.weight_decay=1.0"],
    "train.optimizer.name=sgd": [],
    "train.optimizer.lr=0.02": [],
    "train.optimizer.weight_decay=1.0": [],
    "train.optimizer.no_decay=norms-and-biases": ["train.optimizer.weight_decay=1.0"],
    "train.optimizer.momentum=0.5": ["train.optimizer.name=sgd"],
    "train.optimizer.betas=[0.5,0.9]": [],
    "train.optimizer.clip=0.01": ["train.optimizer.name=sgd"],
    "train.schedule.name=cosine": [],
    "train.schedule.name=linear": [],
    "train.schedule.name=constant": [DECAY],
    "train.schedule.warmup_steps=3": [],
    DECAY: [],
    "train.schedule.factor=0.5": [DECAY],
    "train.precision=bf16": [],
    "train.log_every=2": [],
    "train.early_stop=1": [STILL, "train.epochs=3"],
    "evaluation.split=test": [],
    "evaluation.max_images=2": [],
}
"""Changes that must be seen in a run, with what else has to be set for that."""

ELSEWHERE = {
    "data.source": "how data is read, not how it is trained on",
    "data.format": "how data is read",
    "data.options": "how data is read",
    "data.features.extractor": "how data is read",
    "data.features.options": "how data is read",
    "data.dev_share": "tests/data/test_splits.py",
    "data.noise_index": "tests/data/test_splits_noise.py",
    "data.vocabulary": "needs a file; tests/models/test_models.py",
    "data.random_crop": "pixels only; tests/features/test_pixels.py",
    "data.flip": "pixels only; tests/features/test_pixels.py",
    "data.workers": "speed",
    "data.stream": "shards only; tests/data/batches/test_streaming.py",
    "data.shuffle_buffer": "shards only; tests/data/batches/test_streaming.py",
    "data.features_on_gpu": "speed, on a GPU",
    "model.init_from": "needs a run; tests/models/test_warm_start.py",
    "train.optimizer.pretrained_lr_factor": "needs a BERT; tests/models/test_model_bert_parts.py",
    "train.chunk_size": "memory against time",
    "train.compile": "speed",
    "train.cuda_graphs": "speed, on a GPU",
    "train.device": "where it runs",
    "train.save_every": "what a killed run goes on from; tests/training/test_trainer.py",
    "train.tensorboard": "another log; tests/training/test_trainer.py",
    "evaluation.test_split": "after training",
    "evaluation.folds": "after training",
    "evaluation.batch_size": "memory against time",
    "evaluation.bootstrap": "after training",
}
"""Keys whose effect no short run shows, with where or why."""


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the configuration that holds a value."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def key_of(change: str) -> str:
    """The key that an override sets; parts of a model and objectives are keys as a whole."""
    parts = change.partition("=")[0].split(".")
    return ".".join(parts[:2] if parts[0] == "model" else parts)


def test_every_key_is_tried_or_listed_as_one_that_is_not() -> None:
    assert {*map(key_of, EFFECTS)} | ELSEWHERE.keys() == set(keys(RunConfig))
    assert not {*map(key_of, EFFECTS)} & ELSEWHERE.keys()


def reads(source: str) -> set[tuple[str, str]]:
    """What a file reads of what: ``train.epochs`` as ("train", "epochs")."""
    result = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
            result.add((owner, node.attr))
    return result


def test_every_key_is_read_somewhere() -> None:
    by_name = {"model.image", "model.text", "model.matcher"}  # by `getattr`, all three alike
    unread = {}
    for key in set(keys(RunConfig)) - by_name:
        *above, name = key.split(".")
        unread[key] = {(owner, name) for owner in (*above[-1:], "config", "settings")}
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        wanted = set().union(*unread.values())
        if any(name in source and owner in source for owner, name in wanted):  # ast is slow
            found = reads(source)
            unread = {key: pairs for key, pairs in unread.items() if not pairs & found}
    assert not unread, f"nobody reads {sorted(unread)}"


class Runs:
    """Short runs by what was changed, each made once."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, {}
        sizes = {"train": 12, "dev": 4, "test": 4}
        splits = {n: make_split(root, n, k, s) for s, (n, k) in enumerate(sizes.items())}
        self.pairs = Pairs("few", splits)

    def result(self, *changes: str) -> Mapping[str, Any]:
        if changes not in self.made:
            tree: dict[str, Any] = {}
            for change in (*BASE, *changes):
                tree = apply_override(tree, change)
            config = build_config(tree)
            pairs = with_noise(config, self.pairs)
            torch.manual_seed(config.seed)
            model = create_model(config.model, pairs.train, config.data)
            folder = self.root / str(len(self.made))
            Trainer(model, pairs, config, folder).run()
            self.made[changes] = {
                "metrics": (folder / "metrics.jsonl").read_bytes(),
                "weights": (folder / "last" / "model.safetensors").read_bytes(),
            }
        return self.made[changes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def test_the_same_run_twice_is_the_same(runs) -> None:
    assert runs.result() == runs.result("seed=0")


@pytest.mark.parametrize("change", EFFECTS)
def test_a_key_changes_the_run(runs, change) -> None:
    beside = EFFECTS[change]
    assert runs.result(*beside) != runs.result(*beside, change)
