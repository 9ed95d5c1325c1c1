"""Runs that learn from pixels: trained, resumed, judged, explained and searched from photos."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import CLIPModel
from typer.testing import CliRunner

import counterfoil as cf
from counterfoil.cli import app
from counterfoil.core.config import build_config, load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.data.images import FileImage, open_image
from counterfoil.features import extractors
from counterfoil.models import create_model, from_pretrained, resolve
from counterfoil.training.run import execute
from counterfoil.training.run_data import read_data, wanted_features
from counterfoil.training.run_folder import resolve_paths
from counterfoil.training.trainer import Trainer
from tests.models.duals import dual_config, photo_pairs, save_dual, write_table

runner = CliRunner()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    """A folder with photos, captions and two dual encoders."""
    root = tmp_path_factory.mktemp("dual-runs")
    write_table(root, photo_pairs(root / "photos"))
    for kind in ("clip", "siglip"):
        save_dual(root / kind, kind)
    return root


def config_of(place: Path, kind: str = "clip", objective="infonce", data=None, train=None, **parts):
    settings = {"epochs": 2, "batch_size": 8, "device": "cpu", "log_every": 1, **(train or {})}
    settings.setdefault("optimizer", {"lr": 1e-3, "pretrained_lr_factor": 1.0})
    return dual_config(
        kind,
        place / kind,
        objective=objective,
        data={"source": str(place / "captions.jsonl"), **(data or {})},
        train=settings,
        evaluation={"bootstrap": 0},
        **parts,
    )


def train(config, folder: Path, place: Path, resume: bool = False, stop=lambda: False):
    """A run without its report, which costs more than so small a model."""
    pairs = read_data(config, place / "cache", Silent())
    torch.manual_seed(config.seed)
    model = (
        from_pretrained(folder / "last")
        if resume
        else create_model(config.model, pairs.train, config.data)
    )
    return Trainer(model, pairs, config, folder, should_stop=stop).run(resume=resume)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def command(*args: object):
    result = runner.invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(place):
    """A run of SCAN on CLIP, whose pretrained weights are gone by the time it is used."""
    source = save_dual(place / "gone", "clip")
    config = config_of(place, matcher={"name": "scan-t2i"}, objective="triplet")
    model = config.model.model_copy(update={"image": {"pretrained": str(source)}})
    execute(config.model_copy(update={"model": model}), place / "run", place / "cache")
    shutil.rmtree(source)
    return place / "run"


@pytest.mark.parametrize(
    ("kind", "objective"),
    [("siglip", "siglip"), ("clip", "infonce"), ("clip", "selhn")],
)
@pytest.mark.slow
def test_a_dual_encoder_learns_from_photos(kind, objective, place, tmp_path) -> None:
    config = config_of(place, kind, objective, train={"epochs": 8})
    split = read_data(config, place / "cache", Silent()).train
    new = create_model(config.model, split, config.data)
    train(config, tmp_path / "run", place)
    trained = from_pretrained(tmp_path / "run" / "last")
    assert cf.evaluate(trained, split).rsum > 1.8 * cf.evaluate(new, split).rsum


@pytest.mark.slow
def test_workers_and_augmentation_read_the_same_batches(place, tmp_path) -> None:
    results = []
    for workers in (0, 1):
        data = {"random_crop": 0.4, "flip": True, "workers": workers}
        config = config_of(place, data=data, train={"epochs": 1})
        train(config, tmp_path / f"run{workers}", place)
        results.append(losses(tmp_path / f"run{workers}"))
    assert results[0] == results[1]
    train(config_of(place, train={"epochs": 1}), tmp_path / "plain", place)
    assert losses(tmp_path / "plain") != results[0]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(place, tmp_path) -> None:
    parts = {"image": {"freeze": 1, "layer_decay": 0.8, "checkpointing": True}}
    config = config_of(place, data={"random_crop": 0.5}, **parts)
    train(config, tmp_path / "whole", place)
    calls = iter([False, False, True])
    stopped = train(config, tmp_path / "cut", place, stop=lambda: next(calls, False))
    assert stopped.interrupted
    train(config, tmp_path / "cut", place, resume=True)
    name = "metrics.jsonl"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_frozen_layers_leave_a_run_as_they_came(place, tmp_path) -> None:
    config = config_of(place, image={"freeze": 1}, text={"freeze": -1}, train={"epochs": 1})
    train(config, tmp_path / "run", place)
    was = CLIPModel.from_pretrained(place / "clip")
    now = from_pretrained(tmp_path / "run" / "best")
    first, second = was.vision_model.encoder.layers
    kept, learned = now.image_encoder.tower.model.encoder.layers
    assert torch.equal(kept.mlp.fc1.weight, first.mlp.fc1.weight)
    assert not torch.equal(learned.mlp.fc1.weight, second.mlp.fc1.weight)
    text = now.text_encoder.tower
    assert torch.equal(text.projection.weight, was.text_projection.weight)


@pytest.mark.slow
def test_half_precision_trains(place, tmp_path) -> None:
    config = config_of(place, train={"epochs": 1, "precision": "bf16"})
    train(config, tmp_path / "run", place)
    assert all(0 < loss < 10 for loss in losses(tmp_path / "run"))


def test_a_finished_run_is_evaluated_without_its_source(trained, place) -> None:
    again = json.loads(command("evaluate", trained, "--cache", place / "cache", "--json"))
    kept = json.loads((trained / "results.json").read_text())
    assert again["rsum"] == pytest.approx(kept["rsum"])


@pytest.mark.slow
def test_a_finished_run_explains_a_photo_with_its_patches(trained, place, tmp_path) -> None:
    photo = place / "photos" / "test-0.png"
    out = json.loads(
        command("explain", trained, photo, "a dog and a cat", "--json", "--out", tmp_path / "e.png")
    )
    assert len(out["boxes"]) == 4
    assert [len(word["region_weights"]) for word in out["words"]] == [4] * 5
    assert (tmp_path / "e.png").stat().st_size > 0


@pytest.mark.slow
def test_photos_are_indexed_and_searched_directly(trained, place, tmp_path) -> None:
    index = tmp_path / "index"
    command("index", trained, place / "captions.jsonl", "--out", index, "--cache", place / "cache")
    model = from_pretrained(trained / "best")
    photo = place / "photos" / "test-3.png"
    results = json.loads(command("search", index, "--image", photo, "-k", 4, "--json"))
    see = extractors.create(model.fragments_from, {})
    patches = see.extract(open_image(FileImage(photo)))
    captions = [hit["text"] for hit in results["hits"]]
    expected = model.score([patches], captions)[0].tolist()
    assert [hit["score"] for hit in results["hits"]] == pytest.approx(expected, abs=1e-4)
    results = json.loads(
        command("search", index, "a dog and a cat", "-k", 2, "--explain", 1, "--json")
    )
    assert len(results["hits"][0]["match"]["boxes"]) == 4


def test_paths_of_pretrained_weights_hold_from_anywhere(place, monkeypatch) -> None:
    monkeypatch.chdir(place)
    config = resolve_paths(dual_config("clip", Path("clip"), text={"pretrained": "siglip"}))
    assert config.model.image["pretrained"] == str((place / "clip").resolve())
    assert config.model.text["pretrained"] == str((place / "siglip").resolve())
    named = resolve_paths(dual_config("clip", Path("openai/clip-vit-base-patch32")))
    assert named.model.image["pretrained"] == "openai/clip-vit-base-patch32"


def test_features_that_a_model_would_not_read_are_refused(place) -> None:
    config = config_of(place, data={"features": {"extractor": "efficientnet-lite"}})
    with pytest.raises(ConfigError, match="reads pixels, not features of 'efficientnet-lite'"):
        wanted_features(config)
    squashed = config_of(
        place, data={"features": {"extractor": "pixels", "options": {"fit": "squash"}}}
    )
    pairs = read_data(squashed, place / "cache", Silent())
    assert '"fit": "squash"' in pairs.train.fragments.made_by
    plain = build_config({"data": {"features": {"extractor": "onnx"}}})
    assert wanted_features(plain).extractor == "onnx"


@pytest.mark.parametrize("name", ["f30k/clip", "coco/clip", "f30k/siglip"])
def test_the_recipes_are_whole(name) -> None:
    config = load_config(name)
    assert config.model.name == name.partition("/")[2]
    assert resolve(config.model).image["name"] == "dual"
    assert resolve_paths(config).model.image["pretrained"].count("/") == 1


@pytest.mark.slow
def test_python_says_the_same(place, tmp_path) -> None:
    pairs = cf.load_pairs(
        place / "captions.jsonl", extractor=f"pixels:{place / 'clip'}", cache_dir=tmp_path
    )
    model = cf.create("clip", pairs, embed_size=12, image={"pretrained": str(place / "clip")})
    before = cf.evaluate(model, pairs.test).rsum
    result = cf.train(
        model, pairs, "infonce", folder=tmp_path / "run", epochs=1, batch_size=8, device="cpu"
    )
    assert cf.evaluate(model, pairs.test).rsum != before
    again = from_pretrained(result.folder / "best")
    assert extractors.create(again.fragments_from, {}).dim == pairs.train.fragments.dim
