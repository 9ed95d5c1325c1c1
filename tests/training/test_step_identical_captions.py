"""Captions that stand word for word at another image are never negatives of an image."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.distributed import rank
from counterfoil.core.progress import Silent
from counterfoil.data.duplicates import spoken
from counterfoil.data.pairs import Pairs, Split
from counterfoil.matchers.mismatch_boundary import Mismatches
from counterfoil.models import create_model
from counterfoil.models.store import save_pretrained
from counterfoil.objectives import alignment, hard_candidates, tags
from counterfoil.objectives import aoq as offline
from counterfoil.objectives.composite import Composite
from counterfoil.training.extra_negatives import foil_negatives
from counterfoil.training.guides.build import build_guide
from counterfoil.training.step import TrainingBatchServices
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split, thinned
from tests.training.trained_runs import save_teacher

KINDS = ("harbor", "forest", "stadium", "beach")
SMALL = {
    "data": {"min_count": 1},
    "train": {"epochs": 2, "batch_size": 12, "log_every": 1, "device": "cpu"},
}
IN_BATCH = {
    "hardest": {"hardest": {}},
    "triplet": {"triplet": {}},
    "selhn": {"selhn": {"epsilon": 0.1}},
    "infonce": {"infonce": {}},
    "siglip": {"siglip": {}},
    "ssp": {"ssp": {}},
    "sct": {"sct": {}},
    "lseh": {"lseh": {"dim": 4}},
    "sel": {"sel": {}},
    "distance": {"distance-weighted": {}},
    "two terms": {"triplet": {"epochs": [0, 1]}, "hardest": {"weight": 0.5}},
    "guesses, too": {"hardest": {}, "protect": {"captions": 0.9}},
    "meta": {"meta-spn": {"meta_share": 0.2}},
    "counterfactual": {"cfm": {"adjust": 1.0, "explore": 1.0}},
}


def with_twins(split: Split) -> Split:
    """Four of five captions of each image stand at others of its kind, spelt a little otherwise."""
    captions = []
    for image in range(len(split)):
        kind = KINDS[image % len(KINDS)]
        end = "." if image % 3 else " !"
        captions.append(
            [f"This is a {kind}{end}", f"An aerial view of a {kind}", f"one {kind} by a road{end}",
             f"the {kind}  is LARGE", f"number {image} and a {kind}"]
        )  # fmt: skip
    return replace(split, captions=captions)


@pytest.fixture(scope="module")
def alike(tmp_path_factory) -> Pairs:
    folder = tmp_path_factory.mktemp("alike")
    sizes = {"train": 16, "dev": 8, "test": 8}
    return Pairs(
        "alike", {name: with_twins(make_split(folder, name, n, 5)) for name, n in sizes.items()}
    )


@dataclass
class Heard(Silent):
    lines: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)


def trainer(
    pairs: Pairs, folder: Path, objective: dict, progress: Silent | None = None, **change
) -> Trainer:
    model = {"name": "vse-fc", "embed_size": 16, "text": {"word_dim": 8}, **change.pop("model", {})}
    settings = build_config(
        {**SMALL, "model": model, "objective": objective,
         "data": {**SMALL["data"], **change.pop("data", {})},
         "train": {**SMALL["train"], **change}}
    )  # fmt: skip
    torch.manual_seed(0)
    created = create_model(settings.model, pairs.train, settings.data)
    return Trainer(created, pairs, settings, folder, progress)


class Recorder:
    """Notes the gradient of the loss at every score of every batch of a run."""

    def __init__(self, monkeypatch) -> None:
        self.cells: list[tuple[int, int, float]] = []
        compute = Composite.compute

        def recorded(objective, scores, positives, context):
            for matrix in context.members or (scores,):
                if matrix.requires_grad:
                    matrix.register_hook(self._noting(context.image_ids, context.caption_ids))
            return compute(objective, scores, positives, context)

        monkeypatch.setattr(Composite, "compute", recorded)

    def _noting(self, image_ids, caption_ids):
        def note(grad) -> None:
            for row, image in enumerate(image_ids.tolist()):
                for column, caption in enumerate(caption_ids.tolist()):
                    self.cells.append((image, caption, float(grad[row, column])))

        return note

    def negatives(self, split: Split) -> tuple[int, int]:
        """How many twins, and how many other captions of other images, had a gradient."""
        own = [{spoken(text) for text in texts} for texts in split.captions]
        twins = others = 0
        for image, caption, grad in self.cells:
            if int(split.image_of[caption]) == image or grad == 0.0:
                continue
            if spoken(split.texts[caption]) in own[image]:
                twins += 1
            else:
                others += 1
        return twins, others


@pytest.mark.parametrize("name", thinned(IN_BATCH, "two terms"))
def test_no_loss_takes_an_identical_caption_as_a_negative(name, alike, tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    run = trainer(alike, tmp_path, IN_BATCH[name])
    run.run()
    twins, others = recorder.negatives(run.batches.items.split)
    assert others > 20
    assert twins == 0


def test_a_guide_says_nothing_of_identical_captions(alike, tmp_path, monkeypatch) -> None:
    save_teacher(alike.train, tmp_path / "teacher")
    build_guide(tmp_path / "guide", [tmp_path / "teacher"], alike.train, form="matrix")
    recorder = Recorder(monkeypatch)
    objective = {"ndgl": {"guide": str(tmp_path / "guide"), "sr": 1.0}}
    trainer(alike, tmp_path / "run", objective, epochs=1).run()
    twins, others = recorder.negatives(alike.train)
    assert others > 20
    assert twins == 0


@pytest.mark.parametrize("kind", ["hard-candidates", "alignment"])
def test_candidates_of_a_cross_encoder_hold_no_identical_caption(
    kind, alike, tmp_path, monkeypatch
) -> None:
    command = []
    find = hard_candidates.candidate_mask

    def noted(positives, context):
        negative = find(positives, context)
        command.append((context.image_ids, context.caption_ids, negative))
        return negative

    module = hard_candidates if kind == "hard-candidates" else alignment
    monkeypatch.setattr(module, "candidate_mask", noted)
    model = {"name": "uniter-small", "text": {}, "matcher": {"layers": 1, "heads": 2}}
    trainer(alike, tmp_path, {kind: {"kept": 3}}, model=model, epochs=1).run()
    own = [{spoken(text) for text in texts} for texts in alike.train.captions]
    assert command
    for image_ids, caption_ids, negative in command:
        for row, image in enumerate(image_ids.tolist()):
            for column, caption in enumerate(caption_ids.tolist()):
                twin = spoken(alike.train.texts[caption]) in own[image]
                assert bool(negative[row, column]) == (not twin)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"chunk_size": 5}, id="cached gradients", marks=pytest.mark.slow),
        pytest.param({"data": {"captions": "grouped"}}, id="grouped captions"),
        pytest.param(
            {"data": {"views": 2}, "batch_size": 6}, id="two views", marks=pytest.mark.slow
        ),
        pytest.param({"model": {"name": "scan-t2i"}}, id="fragments", marks=pytest.mark.slow),
    ],
)
def test_no_route_takes_an_identical_caption_as_a_negative(how, alike, tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    trainer(alike, tmp_path, {"triplet": {}}, **{"epochs": 1, **how}).run()
    twins, others = recorder.negatives(alike.train)
    assert others > 20
    assert twins == 0


def test_identical_captions_are_negatives_if_the_config_says_so(alike, tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    heard = Heard()
    trainer(alike, tmp_path, {"triplet": {}, "protect": {"identical": False}}, heard).run()
    assert recorder.negatives(alike.train)[0] > 20
    assert any("objective.protect.identical=false" in line for line in heard.lines)


def test_a_run_says_at_its_start_how_many_captions_have_a_twin(alike, tmp_path) -> None:
    heard = Heard()
    trainer(alike, tmp_path, {"hardest": {}}, heard, epochs=1).run()
    wanted = (
        "64 of 80 training captions also belong to another image; such pairs are never used as "
        "negatives"
    )
    assert heard.lines.count(wanted) == 1


def test_without_twins_training_is_the_same_to_the_bit(concepts, tmp_path) -> None:
    few = {name: concepts[name].select(range(16)) for name in ("train", "dev")}
    for name, split in few.items():
        few[name] = replace(
            split, captions=[[f"{i} {text}" for text in t] for i, t in enumerate(split.captions)]
        )
    heard, files = Heard(), []
    for protect in ({}, {"protect": {"identical": False}}):
        folder = tmp_path / str(len(protect))
        trainer(Pairs("few", few), folder, {"hardest": {}, **protect}, heard).run()
        files.append(((folder / "metrics.jsonl").read_bytes(),
                      (folder / "last" / "model.safetensors").read_bytes()))  # fmt: skip
    assert files[0] == files[1]
    assert not any("also belong to another image" in line for line in heard.lines)


def test_mined_quintuplets_hold_no_identical_caption(alike, tmp_path, monkeypatch) -> None:
    first = trainer(alike, tmp_path / "unused", {"hardest": {}}).model
    save_pretrained(first, tmp_path / "first")
    given = []
    draw = offline.Quintuplets.of

    def noted(self, caption, rng):
        extra = draw(self, caption, rng)
        given.append((caption, extra))
        return extra

    monkeypatch.setattr(offline.Quintuplets, "of", noted)
    objective = {"aoq": {"first": str(tmp_path / "first"), "candidates": 30}}
    trainer(alike, tmp_path / "run", objective).run()
    train = alike.train
    own = [{spoken(text) for text in texts} for texts in train.captions]
    assert len(given) > 100
    for caption, extra in given:
        (image_off, image_2), (text_off, text_2) = extra.images, extra.texts
        image = int(train.image_of[caption])
        pairs = [(image, text_off), (image_off, train.texts[caption]), (image_off, text_off),
                 (image_2, text_2)]  # fmt: skip
        assert not [pair for pair in pairs if spoken(pair[1]) in own[pair[0]]]


def test_an_image_that_shares_a_caption_with_every_other_has_quintuplets_too(
    alike, tmp_path
) -> None:
    captions = [["a harbor", "a forest"], *[["a harbor"], ["a forest"], ["a beach"]] * 5]
    captions[3::3] = [["a forest"]] * 5  # every caption stands at the first image, too
    train = replace(alike.train, captions=captions)
    pairs = Pairs("one", {**alike.splits, "train": train})
    save_pretrained(trainer(pairs, tmp_path / "x", {"hardest": {}}).model, tmp_path / "first")
    run = trainer(pairs, tmp_path / "run", {"aoq": {"first": str(tmp_path / "first")}}, epochs=1)
    quintuplets = run.objective.terms["aoq"].quintuplets
    extra = quintuplets.of(0, np.random.default_rng(0))
    assert extra.images == (0, 0)
    assert extra.texts == ("a harbor", "a harbor")
    run.run()


def test_clean_and_noisy_pairs_are_told_apart_without_twins(alike, tmp_path, monkeypatch) -> None:
    from counterfoil.objectives import ncr as noisy

    counted = []
    measure = noisy.pair_losses

    def noted(directions, margin):
        counted.append(directions[0].is_negative)
        return measure(directions, margin)

    monkeypatch.setattr(noisy, "pair_losses", noted)
    run = trainer(alike, tmp_path, {"ncr": {}}, model={"ensemble_size": 2})
    surveyed = list(run.survey())
    counted.clear()
    run.objective.begin_epoch(1, lambda: iter(surveyed))
    own = [{spoken(text) for text in texts} for texts in alike.train.captions]
    masks = counted[:: len(surveyed[0][0])]
    assert len(masks) == len(surveyed)
    for negative, (_, image_ids, caption_ids) in zip(masks, surveyed, strict=True):
        for row, image in enumerate(image_ids.tolist()):
            for column, caption in enumerate(caption_ids.tolist()):
                twin = spoken(alike.train.texts[caption]) in own[image]
                assert bool(negative[row, column]) == (not twin)


def test_naaf_learns_no_mismatch_from_an_identical_caption(alike, tmp_path, monkeypatch) -> None:
    seen = []
    run = trainer(alike, tmp_path, {"hardest": {}}, model={"name": "naaf"}, epochs=1)
    monkeypatch.setattr(run.model.matcher, "observe", seen.append)
    run.run()
    assert seen
    met = 0
    for observation in seen:
        rows = torch.arange(len(observation.scores))
        for shift in (1, 2, 3):
            twin = observation.protected[rows, (rows - shift) % len(rows)]
            assert not (Mismatches.of(observation, shift).counted[:, 1] & twin).any()
            met += int(twin.sum())
    assert met > 0


def test_a_foil_is_never_a_caption_of_its_image(tmp_path) -> None:
    captions = [["A dog on a table.", "a TABLE on a dog"], ["a cat under a chair"]]
    split = Split("train", ["x", "y"], captions)
    drawn = foil_negatives("rules:swap", 3, split, Silent())
    rng = np.random.default_rng(0)
    assert drawn.of(0, rng).texts == ()  # the only swap is the other caption
    assert drawn.of(2, rng).texts == ("a chair under a cat",)
    path = tmp_path / "foils.jsonl"
    path.write_text(
        '{"image": "x", "caption": 0, "foil": "A table, on a dog!"}\n'
        '{"image": "x", "caption": 0, "foil": "a cat on a table"}\n'
    )
    listed = foil_negatives(str(path), 3, split, Silent())
    assert listed.of(0, rng).texts == ("a cat on a table",)


def test_tags_writes_no_caption_of_the_same_image(alike, tmp_path, monkeypatch) -> None:
    written: list[tuple[int, tuple[int, ...]]] = []
    score_foils = tags.score_foils

    def noted(live: TrainingBatchServices, images, generated, with_states):
        for row, image in enumerate(live.batch.owners.tolist()):
            real = generated.captions.mask[row]
            written.extend((image, tuple(foil[real].tolist()))
                           for foil in generated.foils[row][generated.real[row]])  # fmt: skip
        return score_foils(live, images, generated, with_states)

    monkeypatch.setattr(tags, "score_foils", noted)
    model = {
        "name": "uniter-small",
        "text": {},
        "matcher": {"extras": ["mlm"], "layers": 1, "heads": 2},
    }
    objective = {"tags": {"masks": 4, "samples": 6, "kept": 6}}
    run = trainer(alike, tmp_path, objective, model=model, epochs=1)
    run.run()
    own = [{tuple(run.model.text.encode(text)) for text in texts} for texts in alike.train.captions]
    assert len(written) > 20
    assert not [foil for image, foil in written if foil in own[image]]


def negatives_of_a_run(folder: Path) -> tuple[int, int]:
    """As one of two processes: how many negatives were identical captions, and how many not."""
    data = folder / f"data-{rank()}"
    data.mkdir(parents=True)
    sizes = {"train": 16, "dev": 8}
    splits = {name: with_twins(make_split(data, name, n, 5)) for name, n in sizes.items()}
    pairs = Pairs("alike", splits)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        trainer(pairs, folder / "run", {"selhn": {"epsilon": 0.1}}, epochs=1).run()
        return recorder.negatives(pairs.train)


def test_two_processes_take_no_identical_caption_of_the_other_as_a_negative(
    tmp_path, in_two_processes
) -> None:
    for twins, others in in_two_processes(negatives_of_a_run, tmp_path):
        assert twins == 0
        assert others > 20
