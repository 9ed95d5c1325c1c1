"""What was saved is what is read: sums of every file, weights that are numbers."""

from __future__ import annotations

import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

import counterfoil as cf
from counterfoil.errors import CheckpointError
from counterfoil.models import from_pretrained, save_pretrained
from counterfoil.models.checksums import SUMS, check_sums, write_sums
from counterfoil.models.store import WEIGHTS


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
