"""What was saved is what is read: sums of every file, weights that are numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import counterfoil as cf
from counterfoil.core import zoo
from counterfoil.core.errors import CheckpointError
from counterfoil.core.storage.checksums import SUMS, check_sums, write_sums
from counterfoil.features.efficientnet import has_weights
from counterfoil.models import from_pretrained, save_pretrained
from counterfoil.models.store import CONFIG, WEIGHTS
from counterfoil.scoring.encode import score_split
from tests.conftest import thinned


@pytest.fixture
def saved(concepts, tmp_path):
    save_pretrained(cf.create("vse-fc", concepts, embed_size=8), tmp_path / "m")
    return tmp_path / "m"


def flip(path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("place", [-1, -1000, 2000])
def test_a_flipped_byte_of_the_weights_is_found_and_the_file_named(saved, place) -> None:
    from_pretrained(saved)
    flip(saved / WEIGHTS, place)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (damaged or changed|not a re)"):
        from_pretrained(saved)


def test_a_flipped_byte_of_any_other_file_is_found_and_the_file_named(saved) -> None:
    text = (saved / "vocabulary.json").read_text()
    assert '"dog"' in text
    (saved / "vocabulary.json").write_text(text.replace('"dog"', '"dig"'))
    with pytest.raises(CheckpointError, match=r"vocabulary\.json: damaged or changed"):
        from_pretrained(saved)


@pytest.mark.parametrize("content", [None, "", "no sums", f"{'0' * 64}  ../../etc/passwd\n"])
def test_a_saved_model_without_its_sums_is_not_whole(saved, content) -> None:
    (saved / SUMS).unlink()
    if content is not None:
        (saved / SUMS).write_text(content)
    with pytest.raises(CheckpointError, match=SUMS):
        from_pretrained(saved)


def test_the_sums_are_those_of_sha256sum_and_cover_every_file(saved) -> None:
    subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=saved, check=True)
    listed = {line.split("  ")[1] for line in (saved / SUMS).read_text().splitlines()}
    assert listed == {p.name for p in saved.iterdir()} - {SUMS}
    check_sums(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_weight_that_is_not_finite_is_refused_by_its_name(saved, value) -> None:
    weights = load_file(saved / WEIGHTS)
    name = "image_encoder.fc.weight"
    weights[name] = weights[name].to(torch.float64)
    weights[name][1, 2] = value  # 1e300 is infinite in the model's precision
    save_file(weights, saved / WEIGHTS)
    write_sums(saved)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: the weight '{name}'.*finite"):
        from_pretrained(saved)


def test_a_model_without_its_list_of_sums_says_what_to_do(saved) -> None:
    (saved / SUMS).unlink()
    with pytest.raises(CheckpointError, match=r"m: no SHA256SUMS: an incomplete model folder, or"):
        from_pretrained(saved)


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json", WEIGHTS])
def test_a_shortened_list_of_sums_is_refused_by_the_name_of_the_file(saved, name) -> None:
    lines = (saved / SUMS).read_text().splitlines(keepends=True)
    (saved / SUMS).write_text("".join(line for line in lines if name not in line))
    with pytest.raises(CheckpointError, match=rf"{name}: not in SHA256SUMS"):
        from_pretrained(saved)


@pytest.mark.parametrize("name", ["language_model/model.safetensors", "more.json", "vision_model/"])
def test_a_file_or_folder_that_was_added_to_a_model_is_refused_by_name(saved, name) -> None:
    place = saved / name
    place.parent.mkdir(exist_ok=True)
    if name.endswith("/"):
        place.mkdir()
    else:
        place.write_text("x")
    with pytest.raises(CheckpointError, match=rf"{name.split('/')[0]}.*: not in SHA256SUMS"):
        from_pretrained(saved)


def test_a_linked_folder_in_a_model_is_refused_by_name(saved, tmp_path) -> None:
    (tmp_path / "other").mkdir()
    (saved / "language_model").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="language_model: not in SHA256SUMS"):
        from_pretrained(saved)


@pytest.mark.parametrize(
    "change",
    [
        "5",
        "[" * 100_000,
        "null",
        "[]",
        {"input_dim": float("inf")},
        {"input_dim": -1},
        {"input_dim": "8"},
        {"input_dim": 1 << 80},
        {"pretrained": 5},
        {"pretrained": [[1]]},
        {"spec": 5},
        {"spec.image": {}},
        {"spec.image": 5},
        {"spec.image": {"name": [1]}},
        {"spec.ensemble_size": 100_000},
        {"spec.embed_size": 1 << 40},
        {"spec.embed_size": 0},
        {"text_processor": [1]},
        {"fragments_options": 5},
        {"format": [[1]]},
    ],
    ids=lambda change: str(change)[:30],
)
def test_a_forged_config_is_a_checkpoint_error_of_one_line(saved, change) -> None:
    config = saved / "config.json"
    if isinstance(change, str):
        config.write_text(change)
    else:
        layout = json.loads(config.read_text())
        for name, value in change.items():
            place, _, key = name.rpartition(".")
            (layout[place] if place else layout)[key] = value
        config.write_text(json.dumps(layout))
    write_sums(saved)
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        from_pretrained(saved)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_config_of_a_model_beyond_the_memory_is_refused_before_it_is_built(
    saved, monkeypatch
) -> None:
    monkeypatch.setattr("counterfoil.core.tensors.device.machine_memory", lambda: 2**28)
    from_pretrained(saved)
    layout = json.loads((saved / "config.json").read_text())
    layout["spec"] |= {"embed_size": 65_536}
    (saved / "config.json").write_text(json.dumps(layout))
    write_sums(saved)
    with pytest.raises(CheckpointError, match=r"config\.json: .*need more than 0\.2 GiB"):
        from_pretrained(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("name", ["config.json", SUMS, "vocabulary.json"])
def test_a_fifo_in_a_saved_model_is_refused_and_not_waited_for(saved, name) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(CheckpointError, match="not a regular file but a FIFO"):
        from_pretrained(saved)


def test_half_precision_halves_the_file_and_is_single_precision_once_loaded(
    concepts, tmp_path
) -> None:
    model = cf.create("naaf", concepts, embed_size=32)
    save_pretrained(model, tmp_path / "whole")
    save_pretrained(model, tmp_path / "half", half=True, card="# A card")
    sizes = [(tmp_path / name / WEIGHTS).stat().st_size for name in ("whole", "half")]
    assert 0.45 < sizes[1] / sizes[0] < 0.6
    assert (tmp_path / "half" / "README.md").read_text() == "# A card"
    loaded = cf.load(tmp_path / "half", device="cpu")
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}
    split = concepts.test
    exact = score_split(model.eval(), split).scores
    rounded = score_split(loaded, split).scores
    assert 0 < float((exact - rounded).abs().max()) < 0.01  # of scores within -1…1


def test_a_weight_that_half_precision_cannot_hold_is_refused_by_name(concepts, tmp_path) -> None:
    model = cf.create("vse-fc", concepts, embed_size=8)
    with torch.no_grad():
        model.image_encoder.fc.weight[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"image_encoder\.fc\.weight.*above 65504"):
        save_pretrained(model, tmp_path / "m", half=True)
    assert not (tmp_path / "m").exists()
    save_pretrained(model, tmp_path / "m")


@pytest.mark.parametrize("name", thinned(zoo.names(), "scenes-naaf"))
def test_a_shipped_model_loads_by_name_and_scores(name, tmp_path, monkeypatch) -> None:
    if zoo.entries()[name].extra == "vision" and not has_weights(2):
        pytest.skip("needs the weights of EfficientNet-Lite2")
    monkeypatch.chdir(tmp_path)
    model = cf.load(name, device="cpu")
    assert model.yardstick is not None
    assert model.fragments_from is not None
    photo = Image.new("RGB", (200, 150), "white")
    photo.paste((200, 30, 30), (40, 40, 120, 120))
    texts = ["a red car", "a dog in the grass near a tree"]
    scores = model.score([photo], texts)
    assert scores.shape == (1, 2)
    assert torch.isfinite(scores).all()
    config = (zoo.FOLDER / name / "config.json").read_text()
    assert not re.search(r'"(/|~|[A-Z]:)', config), "a path of the machine that trained it"
    assert torch.equal(from_pretrained(name).score([photo], texts), scores)


def test_a_part_that_is_not_registered_here_is_no_damage(saved) -> None:
    config = json.loads((saved / CONFIG).read_text())
    config["spec"]["matcher"] = {"name": "top-regions"}
    (saved / CONFIG).write_text(json.dumps(config))
    write_sums(saved)
    with pytest.raises(CheckpointError, match=r"unknown matcher 'top-regions'.*import the module"):
        from_pretrained(saved)
