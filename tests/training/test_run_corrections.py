"""The rule of a run for corrections: chosen on its own dev split, by whatever trains it."""

from __future__ import annotations

import json

from PIL import Image

from counterfoil.api import train
from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.data.pairs import Pairs
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.training import run as corrections
from counterfoil.training.run import choose_run_rule
from counterfoil.training.run_folder import load_rule
from tests.conftest import make_split
from tests.objectives.test_tags import small


def test_a_model_trained_in_python_has_a_rule_for_corrections_too(tmp_path) -> None:
    splits = {name: make_split(tmp_path, name, 12, seed=0) for name in ("train", "dev")}
    model = small(splits["train"])
    objective = {"hard-candidates": {"kept": 1}}
    folder = tmp_path / "run"
    train(model, Pairs("few", splits), objective, folder=folder, epochs=1, batch_size=16)
    assert load_rule(folder) is not None


def test_a_rule_is_chosen_again_on_the_images_that_the_run_had_set_aside(
    tmp_path, monkeypatch
) -> None:
    """Others of the training images would have been trained on."""
    photos, rows = tmp_path / "photos", ["image,caption,split"]
    photos.mkdir()
    for number in range(14):
        Image.new("RGB", (32, 32), (number * 9, 90, 30)).save(photos / f"{number}.png")
        rows.append(f"{number}.png,a dog number {number},{'test' if number > 11 else 'train'}")
    (photos / "captions.csv").write_text("\n".join(rows))
    run = tmp_path / "run"
    config = build_config({"data": {"source": str(photos / "captions.csv")}})
    for folder in (run, run / "best"):
        folder.mkdir()
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "best" / "config.json").write_text("{}")
    aside = ["2", "5", "7"]
    (run / "dev_split.json").write_text(json.dumps({"ids": aside}))
    chosen_on = []

    def choose(model, split, **_):
        chosen_on.extend(split.ids)
        return CorrectionRule(precision=1.0, made=5)

    monkeypatch.setattr(corrections, "choose_rule", choose)
    model = small(make_split(tmp_path, "train", 4, seed=0))
    choose_run_rule(run, model, tmp_path / "cache", Silent())
    assert chosen_on == aside


def test_the_best_checkpoint_of_a_run_keeps_to_the_rule_of_the_run(tmp_path) -> None:
    best = tmp_path / "run" / "best"
    best.mkdir(parents=True)
    assert load_rule(best) is None
    (tmp_path / "run" / "correction_rule.json").write_text('{"usable": false}')
    assert load_rule(best) == load_rule(tmp_path / "run") == CorrectionRule(usable=False)
