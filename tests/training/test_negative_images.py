"""Images that show foils: retrieved anew each epoch, or drawn; a run with them resumes exactly."""

from __future__ import annotations

import numpy as np
import pytest

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.batches.dataset import ExtraItems
from counterfoil.data.fragments import Fragments
from counterfoil.data.scenes import false_scene
from counterfoil.data.scenes.truth import captions_of, scene_of
from counterfoil.models import create_model
from counterfoil.training.extra_negatives import nearest_images
from counterfoil.training.negative_images import RetrievedImages, draw_false_scenes, fixed_foils
from counterfoil.training.run_data import read_data
from counterfoil.training.services import TrainingRunSetup
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split
from tests.objectives.live import score, small_model, some_of
from tests.objectives.test_foils import run_config
from tests.training.test_trainer import metrics, trainer, weights


class Given:
    """Foils that are listed."""

    def __init__(self, foils: dict[int, tuple[str, ...]]) -> None:
        self.foils = foils

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        return ExtraItems(texts=self.foils.get(caption, ()))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("images"), "train", 12, seed=0)


def test_the_nearest_image_is_the_one_that_plain_loops_find(split) -> None:
    model = small_model(split, "vse-fc")
    texts = ["a dog near a kite", "boats", "a dog"]
    owners = np.array([3, 0, 11])
    result = nearest_images(model, split, texts, owners)
    for text, own, image in zip(texts, owners, result, strict=True):
        assert image != own
        scores = {i: score(model, split, i, text) for i in range(12) if i != own}
        assert scores[int(image)] == pytest.approx(max(scores.values()), abs=1e-5)


def test_texts_with_an_image_come_first(split) -> None:
    foils = {2: ("one", "two", "three"), 5: ("four",)}
    made = RetrievedImages.of_split(foils, split, None)
    made.images = np.array([-1, 7, -1, 4])
    rng = np.random.default_rng(0)
    assert made.of(2, rng) == ExtraItems((7,), ("two", "one", "three"))
    assert made.of(5, rng) == ExtraItems((4,), ("four",))
    assert made.of(0, rng) == ExtraItems()


def test_no_foils_at_all_are_refused(split) -> None:
    with pytest.raises(DataError, match="no caption of split 'train' has one"):
        fixed_foils(Given({}), split, 0)


def test_images_that_cannot_be_had_are_refused(split) -> None:
    model, config = small_model(split, "vse-fc"), build_config({"model": {"name": "vse-fc"}})
    setup = TrainingRunSetup(split, model, config, model.device, Silent())
    foils = Given({0: ("a dog",)})
    with pytest.raises(ConfigError, match="these data are not drawn scenes"):
        setup.negative_images(foils, "drawn")
    with pytest.raises(ConfigError, match="expected auto, drawn, retrieved or the folder"):
        setup.negative_images(foils, "drawm")


SCENES = {"options": {"images": [12, 4, 4], "captions": 2}, "min_count": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def scenes(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


@pytest.mark.slow
def test_false_scenes_are_drawn_once_with_the_features_of_the_run(scenes, cache) -> None:
    train = scenes.train
    config = build_config({"data": SCENES, "model": {"name": "vse-fc"}})
    model = create_model(config.model, train, config.data)
    setup = TrainingRunSetup(train, model, config, model.device, Silent(), None, cache)
    source = setup.foils("rules:noun,attribute", 2)
    one, two = (setup.negative_images(source, "auto") for _ in range(2))
    assert one.images is None
    rng, shown, total = np.random.default_rng(0), 0, 0
    for caption in range(len(train.texts)):
        extra, again = one.of(caption, rng), two.of(caption, rng)
        assert extra.texts == again.texts
        assert not extra.images
        image = int(train.image_of[caption])
        truth = train.extras[image]
        first = int(np.searchsorted(train.image_of, image))
        own = captions_of(truth, train.captions[image])[caption - first]
        drawable = [t for t in extra.texts if false_scene(scene_of(truth), own, t) is not None]
        assert list(extra.texts[: len(extra.fragments)]) == drawable
        for mine, theirs in zip(extra.fragments, again.fragments, strict=True):
            assert isinstance(mine, Fragments)
            assert np.array_equal(mine.features, theirs.features)
            assert mine.features.shape[1] == train.fragments.dim
        shown, total = shown + len(extra.fragments), total + len(extra.texts)
    assert shown > 0.2 * total
    with pytest.raises(DataError, match="none of the foils can be drawn"):
        draw_false_scenes({0: ("volcano",)}, train, "segments", {}, cache, Silent())


def test_a_run_on_scenes_learns_from_drawn_images(scenes, cache, tmp_path) -> None:
    config = build_config(
        {
            "data": {**SCENES, "drop_regions": 0.2},
            "model": {"name": "vse-fc", "embed_size": 16, "text": {"word_dim": 8}},
            "objective": {"triplet-clip": {"source": "rules:noun,attribute"}},
            "train": {"epochs": 1, "batch_size": 16, "log_every": 1},
            "evaluation": {"bootstrap": 0},
        }
    )
    model = create_model(config.model, scenes.train, config.data)
    Trainer(model, scenes, config, tmp_path, cache=cache).run()
    assert b'"triplet-clip/images"' in metrics(tmp_path)


@pytest.mark.slow
def test_a_run_with_retrieved_images_resumes_to_the_same_bytes(concepts, tmp_path) -> None:
    few = some_of(concepts)
    settings = run_config("vse-fc", {"triplet-clip": {"count": 2}})
    trainer(few, tmp_path / "whole", settings).run()
    command = iter(range(1000))
    cut = trainer(few, tmp_path / "cut", settings, should_stop=lambda: next(command) >= 1)
    assert cut.run().interrupted
    trainer(few, tmp_path / "cut", settings).run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
