"""Models that read pixels, put to what every model must do, with every matcher of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.data.batches.collate import Collate
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.matchers import matchers
from counterfoil.models import create_model, from_pretrained, models, resolve, save_pretrained
from counterfoil.models.catalogue import pixel_options, reads_pixels
from counterfoil.objectives import create_objective, objectives
from counterfoil.training.services import adopt_scale
from counterfoil.training.step import TrainingStep
from tests.conftest import thinned
from tests.models.duals import dual_config, make_dual, photo_pairs, save_dual, seen

KINDS = ("clip", "siglip")
SCORES_ALONE = [name for name in objectives if not objectives[name].requires]
SMALL = {
    "sgraf": {"sim_dim": 8},
    "sgr": {"sim_dim": 8},
    "saf": {"sim_dim": 8},
    "uniter": {"layers": 1, "heads": 2, "ffn": 8},
}


@pytest.fixture(scope="module")
def duals(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("duals")
    return {kind: save_dual(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, duals):
    return seen(photo_pairs(tmp_path_factory.mktemp("photos")), duals["clip"])


def batch_of(model, pairs, count: int = 6):
    items = CaptionItems(pairs.train, model.text, Augmentation(), 0)
    return Collate(model.text.pad)([items[0, 2 * i, 0] for i in range(count)]).to("cpu")


def test_every_model_that_reads_pixels_is_tested_here() -> None:
    assert {name for name in models if reads_pixels(models[name]())} == set(KINDS)


@pytest.mark.parametrize("objective", thinned(SCORES_ALONE, "hardest", "infonce"))
def test_a_dual_encoder_learns_from_every_objective(objective, photos, duals) -> None:
    kind = KINDS[len(objective) % 2]
    model = make_dual(kind, duals[kind], photos)
    loss, _ = TrainingStep(model, create_objective(objective), None)(batch_of(model, photos), 0, 0)
    loss.backward()
    assert loss.isfinite()
    first = model.image_encoder.tower.model.encoder.layers[0].mlp.fc1.weight
    assert first.grad is not None
    assert first.grad.isfinite().all()


@pytest.mark.parametrize("matcher", thinned(sorted(matchers), "cosine", "scan-t2i", "naaf", "sgr"))
def test_every_matcher_reads_patches_and_tokens(matcher, photos, duals) -> None:
    kind = KINDS[len(matcher) % 2]
    options = {"name": matcher, **SMALL.get(matcher, {})}
    model = make_dual(kind, duals[kind], photos, matcher=options)
    batch = batch_of(model, photos)
    loss, _ = TrainingStep(model, create_objective("triplet"), None)(batch, 0, 0)
    loss.backward()
    assert loss.isfinite()
    model.eval()
    images = [photos.test.fragments.read(i) for i in range(3)]
    captions = photos.test.texts[:4]
    scores = model.score(images, captions)
    order = torch.tensor([2, 0, 1])
    mixed = model.score([images[i] for i in order], captions)
    assert torch.allclose(mixed, scores[order], atol=1e-5)
    alone = model.score(images[:1], captions[:1])
    assert torch.allclose(alone[0, 0], scores[0, 0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_needs_nothing_but_its_folder(kind, photos, tmp_path) -> None:
    source = save_dual(tmp_path / "source", kind)
    model = make_dual(kind, source, photos, image={"layer_decay": 0.7})
    with torch.no_grad():
        model.image_encoder.tower.model.encoder.layers[0].mlp.fc1.weight.mul_(1.5)
    images, captions = [photos.test.fragments.read(i) for i in range(3)], photos.test.texts[:3]
    expected = model.score(images, captions)
    save_pretrained(model, tmp_path / "model")
    shutil.rmtree(source)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    again = from_pretrained(tmp_path / "elsewhere")
    assert torch.equal(again.score(images, captions), expected)
    assert torch.equal(again.image_encoder.mean, model.image_encoder.mean)
    assert again.fragments_from == photos.train.fragments.made_by
    assert again.image_encoder.tower.layer_decay == 0.7
    save_pretrained(again, tmp_path / "twice")
    assert torch.equal(from_pretrained(tmp_path / "twice").score(images, captions), expected)


def test_a_local_matcher_explains_with_patches(photos, duals) -> None:
    model = make_dual("clip", duals["clip"], photos, matcher={"name": "scan-t2i"})
    fragments = photos.test.fragments.read(0)
    match = model.explain(fragments, "a dog and a cat")
    assert [word.word for word in match.words] == ["a", "dog", "and", "a", "cat"]
    assert match.boxes.shape == (4, 4)
    for word in match.words:
        assert word.region_weights.shape == (4,)
    assert json.loads(json.dumps(match.as_dict()))["boxes"] is not None


def test_a_global_matcher_explains_by_leaving_words_out(photos, duals) -> None:
    model = make_dual("siglip", duals["siglip"], photos)
    caption = "a dog near the boat"
    match = model.explain(photos.test.fragments.read(0), caption)
    assert match.method == "leave-one-out"
    shorter = model.score([photos.test.fragments.read(0)], [caption, "a near the boat"])[0]
    assert match.words[1].effect == pytest.approx(float(shorter[0] - shorter[1]), abs=1e-5)


def test_the_text_half_comes_from_the_same_checkpoint_unless_named(photos, duals, tmp_path) -> None:
    model = make_dual("clip", duals["clip"], photos)
    assert model.spec.text["pretrained"] == str(duals["clip"])
    other = save_dual(tmp_path, "clip")
    apart = make_dual("clip", duals["clip"], photos, text={"pretrained": str(other)})
    assert apart.spec.text["pretrained"] == str(other)
    assert pixel_options(apart.spec) == {"model": str(duals["clip"]), "size": 0}


def test_two_copies_score_as_one(photos, duals, tmp_path) -> None:
    config = dual_config("clip", duals["clip"]).model.model_copy(update={"ensemble_size": 2})
    model = create_model(config, photos.train)
    images, captions = [photos.test.fragments.read(0)], photos.test.texts[:2]
    single = make_dual("clip", duals["clip"], photos).score(images, captions)
    assert torch.allclose(model.score(images, captions), single, atol=1e-6)
    save_pretrained(model, tmp_path / "model")
    assert torch.allclose(from_pretrained(tmp_path / "model").score(images, captions), single)


def test_a_model_of_features_reads_no_pixels() -> None:
    assert pixel_options(resolve(dual_config("clip", Path("x")).model)) == {"model": "x", "size": 0}
    assert not reads_pixels(models["naaf"]())
    assert pixel_options(models["naaf"]()) is None


@pytest.mark.parametrize(
    ("kind", "objective", "scale", "bias"),
    [
        ("clip", {"infonce": {}}, 20.0855, None),
        ("clip", {"infonce": {"temperature": 0.05}}, 20.0, None),
        ("siglip", {"siglip": {}}, 20.0855, -7.5),
        ("siglip", {"siglip": 0.5}, 20.0855, -7.5),
        ("siglip", {"siglip": {"scale": 5.0}}, 5.0, -7.5),
        ("siglip", {"siglip": {"bias": -1.0}}, 20.0855, -1.0),
        ("clip", {"infonce": {"learned": False}}, 1 / 0.07, None),
    ],
)
def test_the_learned_scale_goes_on_where_none_is_given(
    kind, objective, scale, bias, photos, duals
) -> None:
    made = create_objective(objective)
    adopt_scale(made, objective, make_dual(kind, duals[kind], photos))
    ((_, term),) = made.each()
    assert float(term.scale(torch.zeros(1)).detach()) == pytest.approx(scale, rel=1e-4)
    if bias is not None:
        assert float(term.bias.detach()) == pytest.approx(bias)


def test_a_scale_of_cosines_is_not_given_to_other_matchers(photos, duals) -> None:
    made = create_objective("infonce")
    adopt_scale(
        made, {"infonce": {}}, make_dual("clip", duals["clip"], photos, matcher={"name": "chan"})
    )
    ((_, term),) = made.each()
    assert float(term.scale(torch.zeros(1)).detach()) == pytest.approx(1 / 0.07)


def test_wrong_parts_are_refused(photos, concepts, duals) -> None:
    config = dual_config("clip", duals["clip"]).model.model_copy(update={"embed_size": 99})
    with pytest.raises(ConfigError, match=r"set model\.embed_size=12"):
        create_model(config, photos.train)
    with pytest.raises(CheckpointError, match=r"no tokenizer|path of a local folder"):
        make_dual("clip", Path("/nowhere"), photos)
    with pytest.raises(DataError, match="reads pixels in patches"):
        make_dual("clip", duals["clip"], concepts)
