"""AOQ: the public formula, quintuplets that hold no true pair, and runs with a real first model."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, ConfigError, DataError, TrainingError
from counterfoil.data.pairs import Pairs, Split
from counterfoil.models.store import save_pretrained
from counterfoil.objectives import Context, create_objective
from counterfoil.objectives.aoq import (
    AOQ,
    Quintuplets,
    QuintupletScores,
    quintuplet_loss,
)
from tests.conftest import assert_close, assert_gradient_close, load_fixture, make_split, thinned
from tests.objectives.live import one_step, prepare, score, small_model, some_of
from tests.training.test_trainer import metrics, trainer, weights


def test_loss_and_gradients_are_those_of_the_public_code() -> None:
    fixture = load_fixture("loss-aoq")
    names = ("img", "cap", "img_off", "cap_off", "img_off2", "cap_off2")
    leaves = [fixture[f"in.{name}"].double().requires_grad_() for name in names]
    image, text, image_off, text_off, image_2, text_2 = leaves
    scores = image @ text.T
    off_diagonal = scores.masked_fill(torch.eye(len(scores)).bool(), -torch.inf)
    result = QuintupletScores(
        scores.diagonal(),
        (off_diagonal.amax(1), off_diagonal.amax(0)),
        ((image * text_off).sum(1), (image_off * text).sum(1)),
        ((image_off * text_off).sum(1), (image_2 * text_2).sum(1)),
    )
    hyper = fixture.hyper
    loss = quintuplet_loss(
        result,
        margin=hyper["marginonline"],
        offline_margin=hyper["marginoffline"],
        alpha=hyper["alpha"],
        beta=hyper["beta"],
    )
    assert_close(loss, fixture["out.loss"], 1e-6)
    loss.backward()
    for name, leaf in zip(names, leaves, strict=True):
        assert_gradient_close(leaf.grad, fixture[f"grad.{name}"], 1e-6)


vectors = st.lists(st.floats(-1, 1), min_size=7, max_size=7)


@given(pairs=st.lists(vectors, min_size=1, max_size=5), detach=st.booleans())
def test_the_loss_is_the_sum_a_plain_loop_makes(pairs, detach) -> None:
    options = {"margin": 0.3, "offline_margin": 0.1, "alpha": 0.4, "beta": 1.2}
    total = 0.0
    for p, on_t, on_i, off_t, off_i, first, second in pairs:
        for on, off in ((on_t, off_t), (on_i, off_i)):
            total += max(0.0, 0.3 + on - p) * (1.2 - (off - on) / 0.4)
        total += sum(max(0.0, 0.1 + s - p) for s in (off_t, off_i, first, second))
    columns = torch.tensor(pairs, dtype=torch.float64).T
    result = QuintupletScores(
        columns[0], tuple(columns[1:3]), tuple(columns[3:5]), tuple(columns[5:])
    )
    assert float(quintuplet_loss(result, detach_weight=detach, **options)) == pytest.approx(total)


def test_a_detached_weight_passes_no_gradient_to_the_offline_negative() -> None:
    for detach in (True, False):
        easy, low = torch.zeros(3), torch.full((3,), -5.0)
        off = torch.full((3,), -1.0, requires_grad=True)
        result = QuintupletScores(easy, (easy, easy), (off, off), (low, low))
        quintuplet_loss(result, detach_weight=detach).backward()
        assert (off.grad == 0).all() == detach


def test_a_pair_without_a_negative_in_its_batch_learns_from_the_offline_ones_alone() -> None:
    scores = torch.tensor([0.5, 0.1], requires_grad=True)
    none = torch.full((2,), -torch.inf)
    zero = torch.zeros(2)
    loss = quintuplet_loss(
        QuintupletScores(scores, (none, none), (zero + 0.3, zero), (zero, zero)),
    )
    assert loss.item() == pytest.approx(0.2)
    loss.backward()
    assert scores.grad.tolist() == [0.0, -1.0]


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return make_split(tmp_path_factory.mktemp("aoq"), "train", 24, seed=0)


@pytest.fixture(scope="module")
def first(tmp_path_factory, split) -> str:
    folder = tmp_path_factory.mktemp("first") / "model"
    save_pretrained(small_model(split, "vse-fc"), folder)
    return str(folder)


@pytest.mark.parametrize("candidates", [1, 8, 300])
def test_a_quintuplet_holds_candidates_and_no_true_pair(split, first, candidates) -> None:
    objective = AOQ(first=first, candidates=candidates)
    prepare(objective, split, small_model(split, "vse-fc"))
    drawn: Quintuplets = pickle.loads(pickle.dumps(objective.extra_negatives()))  # noqa: S301
    of_image, of_caption = objective.quintuplets.captions, objective.quintuplets.images
    assert of_image.shape == (24, candidates)
    assert of_caption.shape == (48, max(2, candidates // 5))
    met = set()
    for caption in range(48):
        own = split.image_of[caption]
        for seed in range(6):
            extra = drawn.of(caption, np.random.default_rng(seed))
            image_off, image_2 = extra.images
            text_off, text_2 = extra.texts
            assert image_off in of_caption[caption]
            assert text_off in {split.texts[t] for t in of_image[own] if t >= 0}
            assert text_off in split.captions[image_2]
            assert text_2 in split.captions[image_off]
            assert len({own, image_off, image_2}) == 3
            met.add((caption, image_off))
    if candidates > 1:
        assert len(met) > 48


def test_both_negatives_come_from_the_same_height_of_their_lists(split) -> None:
    captions = np.arange(30)[None, :] + 2  # of image 0: those of images 1 to 15
    images = np.array([[20, 21, 22, 23, 19, 18]])
    draw = Quintuplets(split, captions.astype(np.int32), images.astype(np.int32))
    for seed in range(40):
        place = int(np.random.default_rng(seed).integers(30))
        image_off, image_2 = draw.of(0, np.random.default_rng(seed)).images
        assert image_off == images[0, place // 5]
        assert image_2 == 1 + place // 2


@pytest.mark.parametrize("captions", ["all", "grouped"])
@pytest.mark.parametrize("name", thinned(["vse-fc", "scan-t2i"], "scan-t2i"))
def test_the_loss_of_a_batch_is_that_of_scores_taken_one_by_one(
    split, first, name, captions
) -> None:
    model = small_model(split, name)
    objective = AOQ(first=first, candidates=20)
    loss, diagnostics, batch, given_ = one_step(objective, split, model, captions, size=5)
    total, gaps = 0.0, []
    for caption, image in zip(batch.caption_ids.tolist(), batch.owners.tolist(), strict=True):
        image_off, image_2 = given_[caption].images
        text_off, text_2 = given_[caption].texts
        text = split.texts[caption]
        p = score(model, split, image, text)
        wrong = [c for c in batch.caption_ids.tolist() if split.image_of[c] != image]
        on_text = max(score(model, split, image, split.texts[c]) for c in wrong)
        images = set(batch.image_ids.tolist()) - {image}
        on_image = max(score(model, split, i, text) for i in images)
        off = [score(model, split, image, text_off), score(model, split, image_off, text)]
        for on, hard in zip((on_text, on_image), off, strict=True):
            total += max(0.0, 0.2 + on - p) * (1.5 - (hard - on) / 0.3)
        off += [score(model, split, image_off, text_off), score(model, split, image_2, text_2)]
        total += sum(max(0.0, s - p) for s in off)
        gaps += [p - off[0], p - off[1]]
    assert loss.item() == pytest.approx(total, rel=1e-4)
    assert float(diagnostics["offline/gap"]) == pytest.approx(np.mean(gaps), abs=1e-5)


def test_the_uninformed_loss_is_that_of_equal_scores() -> None:
    same = torch.full((6,), 0.3)
    pairs = QuintupletScores(same, (same, same), (same, same), (same, same))
    for offline_margin in (0.0, 0.1):
        objective = AOQ(first="x", offline_margin=offline_margin)
        loss = quintuplet_loss(pairs, offline_margin=offline_margin)
        assert objective.loss_at_equal_scores(6, 5) == pytest.approx(float(loss))


def test_what_cannot_work_is_refused_with_the_way_out(split, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"train one.*objective\.aoq\.first=runs/x"):
        create_objective("aoq")
    for options in ({"candidates": 0}, {"alpha": 0.0}):
        with pytest.raises(ConfigError, match=r"objective\.aoq\."):
            create_objective({"aoq": {"first": "x", **options}})
    objective = AOQ(first=str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="neither a run nor a saved model"):
        prepare(objective, split, small_model(split, "vse-fc"))
    with pytest.raises(TrainingError, match="works on the batches of a training run only"):
        objective.compute(torch.zeros(2, 2), torch.eye(2).bool(), Context())


def test_two_images_are_too_few_for_a_quintuplet(split, first) -> None:
    objective = AOQ(first=first)
    with pytest.raises(DataError, match="takes three images"):
        prepare(objective, split.select([0, 1]), small_model(split, "vse-fc"))


@pytest.fixture(scope="module")
def few(concepts) -> Pairs:
    return some_of(concepts)


def run_config(name: str, first: str, **data):
    return build_config(
        {
            "model": {"name": name, "embed_size": 16, "text": {"word_dim": 8}},
            "data": {"min_count": 1, "drop_regions": 0.2, "word_noise": 0.1, **data},
            "objective": {"aoq": {"first": first, "candidates": 20}},
            "train": {"epochs": 2, "batch_size": 32, "log_every": 1},
        }
    )


@pytest.fixture(scope="module")
def first_run(few, tmp_path_factory) -> str:
    """A run trained with another objective on the same data."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    settings = run_config("vse-fc", "unused").model_copy(update={"objective": {"hardest": {}}})
    trainer(few, folder, settings).run()
    return str(folder)


@pytest.mark.parametrize("name", thinned(["vse-fc", "scan-t2i"], "vse-fc"))
@pytest.mark.slow
def test_a_run_with_a_first_run_resumes_to_the_same_bytes(few, first_run, tmp_path, name) -> None:
    settings = run_config(name, first_run)
    whole = trainer(few, tmp_path / "whole", settings).run()
    assert whole.steps == 6
    command = iter(range(1000))
    cut = trainer(few, tmp_path / "cut", settings, should_stop=lambda: next(command) >= 1)
    assert cut.run().interrupted
    trainer(few, tmp_path / "cut", settings).run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_workers_and_grouped_captions_change_nothing_but_the_batches(
    few, first_run, tmp_path
) -> None:
    for workers in (0, 2):
        settings = run_config("vse-fc", first_run, captions="grouped", workers=workers)
        trainer(few, tmp_path / str(workers), settings).run()
    assert metrics(tmp_path / "0") == metrics(tmp_path / "2")
