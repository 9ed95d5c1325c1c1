"""TAGS and TAGS-DC: losses of plain loops, foils that are none of the image's own, real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.data.batches import dataset as once
from counterfoil.data.batches.collate import Collate, PairBatch, pad_texts
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.text.vocabulary import SPECIALS
from counterfoil.models import Model, create_model
from counterfoil.models.foil_generator import FoilMaker
from counterfoil.objectives import Context, Objective
from counterfoil.objectives.hard_candidates import HardCandidates
from counterfoil.objectives.services import GeneratorOptions
from counterfoil.objectives.tags import TAGS, TAGSDC
from counterfoil.training.step import TrainingBatchServices, TrainingStep, score_batch
from tests.conftest import make_split
from tests.objectives.live import prepare, score, some_of
from tests.training.test_trainer import metrics, trainer, weights

HEADS = ["mlm", "discrimination", "correction"]
SMALL = {"masks": 3, "samples": 4, "kept": 5}


def tree(heads: list[str] = HEADS, dropout: float = 0.0, **more) -> dict:
    matcher = {"layers": 1, "heads": 2, "dropout": dropout, "extras": heads}
    parts = {"image": {"dropout": dropout}, "text": {"positions": 16, "dropout": dropout}}
    model = {"name": "uniter-small", "embed_size": 16, "matcher": matcher, **parts}
    return {"model": model, "data": {"min_count": 1, "captions": "one"}, **more}


def small(split: Split, heads: list[str] = HEADS, dropout: float = 0.0) -> Model:
    config = build_config(tree(heads, dropout))
    torch.manual_seed(0)
    return create_model(config.model, split, config.data)


def batch_of(split: Split, model: Model, captions: list[int]) -> PairBatch:
    items = CaptionItems(split, model.text, Augmentation(), 3)
    return Collate(model.text.pad)([items[0, caption, 0] for caption in captions])


def step(objective: Objective, model: Model, batch: PairBatch):
    model.train()
    return TrainingStep(model, objective, None)(batch, 0, 0)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return make_split(tmp_path_factory.mktemp("tags"), "train", 24, seed=0)


class Remembered:
    """A generator that remembers what it wrote."""

    def __init__(self, inner) -> None:
        self.inner, self.last = inner, None

    def __call__(self, live, at):
        self.last = self.inner(live, at)
        return self.last


def remembered(objective: TAGS, split: Split, model: Model) -> Remembered:
    prepare(objective, split, model)
    objective._generator = Remembered(objective._generator)
    return objective._generator


def words_of(model: Model, ids: torch.Tensor) -> str:
    entries = model.text.vocabulary.entries
    return " ".join(entries[i] for i in ids.tolist() if entries[i] not in SPECIALS)


# --- hard candidates ------------------------------------------------------------------------


@pytest.mark.parametrize(("anchors", "kept"), [(0, 3), (3, 2), (4, 31)])
def test_hard_candidates_cost_what_plain_loops_over_single_scores_find(
    split, anchors, kept
) -> None:
    model, captions = small(split), [0, 1, 4, 6, 8, 11, 12]  # the first two share their image
    batch = batch_of(split, model, captions)
    objective = HardCandidates(anchors=anchors, kept=kept, margin=0.05)
    loss, diagnostics = step(objective, model, batch)
    image_of = [c // 2 for c in captions]
    costs: dict[str, list[float]] = {"captions": [], "images": []}
    count = []
    spaced = {0: range(7), 3: (1, 3, 5), 4: (0, 2, 4, 6)}[anchors]
    for image, caption in [(image_of[row], captions[row]) for row in spaced]:
        own = score(model, split, image, split.texts[caption])
        others = [score(model, split, image, split.texts[c]) for c in captions if c // 2 != image]
        costs["captions"] += [max(0, 0.05 + s - own) for s in sorted(others)[-kept:]]
        others = [score(model, split, i, split.texts[caption]) for i in image_of if i != image]
        costs["images"] += [max(0, 0.05 + s - own) for s in sorted(others)[-kept:]]
        count.append(min(kept, len(others)))
    assert loss.item() == pytest.approx(sum(map(np.mean, costs.values())), abs=1e-5)
    assert float(diagnostics["candidates/kept"]) == pytest.approx(np.mean(count))


def test_protected_pairs_and_other_captions_of_the_image_are_no_candidates(split) -> None:
    model = small(split)
    batch = batch_of(split, model, [0, 1, 4])
    live = TrainingBatchServices(model, batch, score_batch(model, batch, scored=False), None)
    positives = batch.image_ids[:, None] == batch.owners
    protected = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 1, 0]]).bool()
    report = HardCandidates(margin=0.3).compute(
        positives.float() * torch.nan, positives, Context(services=live, protected=protected)
    )
    left = score(model, split, 0, split.texts[4])
    expected = [max(0, 0.3 + left - score(model, split, 0, split.texts[1]))]
    towards = [max(0, 0.3 + left - score(model, split, 2, split.texts[4]))]
    assert report.loss.item() == pytest.approx(expected[0] + towards[0], abs=1e-5)
    nobody = HardCandidates().compute(
        positives, positives, Context(services=live, protected=~positives)
    )
    assert nobody.loss.item() == 0.0
    nobody.loss.backward()


def test_candidates_are_sought_without_dropout_and_learned_with_it(split) -> None:
    model = small(split, dropout=0.3)
    batch = batch_of(split, model, [0, 2, 4, 6])
    seen = []
    model.matcher.register_forward_pre_hook(lambda m, _: seen.append((m.training, _grad())))
    loss, _ = step(HardCandidates(kept=2), model, batch)
    assert seen
    assert set(seen) == {(False, False)}
    assert model.training
    assert model.matcher.training
    loss.backward()
    assert model.matcher.pooler.weight.grad.abs().sum() > 0


def _grad() -> bool:
    return torch.is_grad_enabled()


# --- generation -----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1 << 18, 3])
def test_captions_are_cut_once_and_masked_as_ever(split, most, monkeypatch) -> None:
    monkeypatch.setattr(once, "MAX_CACHED_CAPTIONS", most)
    model = small(split)
    batch = batch_of(split, model, [0, 1, 4, 6])
    live = TrainingBatchServices(model, batch, score_batch(model, batch, scored=False), None)
    options = GeneratorOptions(3, 2, 2, 1.0, "graph", "rules")
    fresh, used = (FoilMaker(split, model, options, seed=5) for _ in range(2))
    used.mask(live, 0)
    cut = []
    monkeypatch.setattr(used.masker, "units", lambda text: cut.append(text) or fresh_units(text))
    fresh_units = fresh.masker.units
    again, expected = used.mask(live, 1), fresh.mask(live, 1)
    for name in ("masked", "masked_labels"):
        assert torch.equal(getattr(again, name), getattr(expected, name))
    assert torch.equal(again.captions.ids, expected.captions.ids)
    assert cut == ([split.texts[6]] if most == 3 else [])


@pytest.mark.parametrize("unit", ["graph", "word"])
def test_foils_are_new_for_their_image_and_differ_only_where_there_was_a_mask(split, unit) -> None:
    model = small(split)
    objective = TAGS(**SMALL, unit=unit, temperature=2.0)
    written = remembered(objective, split, model)
    captions = [0, 3, 5, 8]
    _, diagnostics = step(objective, model, batch_of(split, model, captions))
    made = written.last
    special = {model.text.vocabulary.index[word] for word in SPECIALS}
    for row, caption in enumerate(captions):
        own = {i for c in split.captions[caption // 2] for i in model.text.encode(c)}
        true = made.captions.ids[row]
        assert words_of(model, true) == split.texts[caption]
        foils = [tuple(f.tolist()) for f in made.foils[row][made.real[row]]]
        assert len(set(foils)) == len(foils)
        labels = made.foil_labels[row][made.real[row]]
        for foil, label in zip(foils, labels.tolist(), strict=True):
            changed = [
                p for p, (a, b) in enumerate(zip(foil, true.tolist(), strict=True)) if a != b
            ]
            assert all(label[place] == true[place] for place in changed)
            assert any(foil[place] not in own for place in changed)
            assert not special.intersection(foil[place] for place in changed)
        scores = [
            score(model, split, caption // 2, words_of(model, torch.tensor(f))) for f in foils
        ]
        assert scores == sorted(scores, reverse=True)
    assert float(diagnostics["tags/kept"]) == pytest.approx(float(made.real.sum()) / 4)
    assert made.real.any()


def test_the_same_step_writes_the_same_foils_and_another_does_not(split) -> None:
    model = small(split)
    objective = TAGS(**SMALL)
    written = remembered(objective, split, model)
    batch = batch_of(split, model, [0, 3, 5, 8])
    live = TrainingBatchServices(model, batch, score_batch(model, batch, scored=False), None)
    made = []
    for at in (4, 4, 5):
        torch.manual_seed(1)
        made.append(written(live, at))
    assert made[0].masked.equal(made[1].masked)
    assert made[0].foils.equal(made[1].foils)
    assert not made[0].masked.equal(made[2].masked)


def test_disturbed_words_do_not_reach_the_foils(split) -> None:
    model = small(split)
    objective = TAGS(**SMALL)
    written = remembered(objective, split, model)
    items = CaptionItems(split, model.text, Augmentation(words=0.9), 3)
    batch = Collate(model.text.pad)([items[0, caption, 0] for caption in (0, 2)])
    step(objective, model, batch)
    assert [words_of(model, ids) for ids in written.last.captions.ids] == [
        split.texts[0],
        split.texts[2],
    ]


# --- losses ---------------------------------------------------------------------------------


def logits_one_by_one(model: Model, split: Split, image: int, ids: torch.Tensor):
    """States of the words of one sentence with one image, by a pass of its own."""
    from counterfoil.data.batches.collate import pad_fragments

    images = model.encode_images(pad_fragments([split.fragments.read(image)]))
    texts = model.encode_texts(pad_texts([ids.tolist()], model.text.pad))
    return model.matcher.states(images, texts).words[0]


@pytest.mark.parametrize("anchors", [0, 3])
@pytest.mark.parametrize("kind", [TAGS, TAGSDC])
def test_the_loss_is_what_plain_loops_over_single_sentences_find(split, kind, anchors) -> None:
    model, captions = small(split), [0, 3, 5]
    together = [0, 8, 3, 10, 5] if anchors else captions  # every second is an anchor
    with torch.no_grad():  # heads that have learned nothing hide mistakes
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    more = {"discrimination": 0.7, "correction": 1.3, "replaced": 2.0} if kind is TAGSDC else {}
    more |= {"margin": 0.1, "mlm": 0.5, "rank": 2.0}
    objective = kind(**SMALL, temperature=2.0, anchors=anchors, **more)
    written = remembered(objective, split, model)
    loss, diagnostics = step(objective, model, batch_of(split, model, together))
    made, table, heads = written.last, model.text_encoder.embed.weight, model.matcher.heads
    fills, ranks, told, fixed, below, gaps = [], [], [], [], [], []
    for row, caption in enumerate(captions):
        image, length = caption // 2, int(made.captions.mask[row].sum())
        true = made.captions.ids[row][:length]
        positive = score(model, split, image, split.texts[caption])
        for version, labels in zip(made.masked[row], made.masked_labels[row], strict=True):
            states = logits_one_by_one(model, split, image, version[:length])
            for state, label in zip(states, labels, strict=False):
                if label != -1:
                    fills.append(F.cross_entropy(heads["mlm"](state, table), label))
        for foil, labels in zip(
            made.foils[row][made.real[row]], made.foil_labels[row][made.real[row]], strict=True
        ):
            negative = score(model, split, image, words_of(model, foil))
            ranks.append(max(0.0, 0.1 + negative - positive))
            below.append(positive > negative)
            gaps.append(positive - negative)
            states = logits_one_by_one(model, split, image, foil[:length])
            for place, state in enumerate(states):
                same = foil[place] == true[place]
                verdict = F.cross_entropy(heads["discrimination"](state), same.long())
                told.append(verdict * (0.11 if same else 2.0))
                if labels[place] != -1:
                    fixed.append(F.cross_entropy(heads["correction"](state, table), labels[place]))

    def mean(values) -> float:
        return float(np.mean([torch.as_tensor(value).item() for value in values]))

    expected = 0.5 * mean(fills) + 2.0 * mean(ranks)
    if kind is TAGSDC:
        expected += 0.7 * mean(told) + 1.3 * mean(fixed)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert float(diagnostics["tags/accuracy"]) == pytest.approx(mean(below))
    assert float(diagnostics["tags/gap"]) == pytest.approx(mean(gaps), abs=1e-5)
    assert float(diagnostics["tags/difficulty"]) == pytest.approx(mean([g < 0 for g in gaps]))


def test_gradients_reach_every_head_the_layers_and_the_word_vectors(split) -> None:
    model = small(split)
    objective = TAGSDC(**SMALL, temperature=2.0)
    prepare(objective, split, model)
    loss, _ = step(objective, model, batch_of(split, model, [0, 3, 5]))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # keys shift all of a query's logits alike
        if "bias" not in name:
            assert parameter.grad.abs().sum() > 0, name


def test_a_caption_whose_foils_are_all_true_costs_no_rank_but_still_learns_to_fill(split) -> None:
    every = " ".join(sorted({word for text in split.texts for word in text.split()}))
    known = replace(split, captions=[[*own, every] for own in split.captions])
    model = small(known)
    objective = TAGSDC(**SMALL)
    prepare(objective, known, model)
    loss, diagnostics = step(objective, model, batch_of(known, model, [0, 3]))
    assert float(diagnostics["tags/kept"]) == 0
    assert float(diagnostics["tags/rank"]) == 0
    assert loss.item() == pytest.approx(0.1 * float(diagnostics["tags/mlm"]))
    loss.backward()


# --- what is refused ------------------------------------------------------------------------


def test_a_model_that_cannot_fill_masks_is_told_what_to_set(split) -> None:
    with pytest.raises(ConfigError, match=r"extras=\[mlm,discrimination,correction\]"):
        prepare(TAGSDC(), split, small(split, ["mlm"]))
    with pytest.raises(ConfigError, match=r"extras=\[mlm\]"):
        prepare(TAGS(), split, small(split, []))
    config = build_config({"model": {"name": "vse-fc", "embed_size": 8}, "data": {"min_count": 1}})
    with pytest.raises(ConfigError, match="uniter-small"):
        prepare(TAGS(), split, create_model(config.model, split, config.data))
    with pytest.raises(ConfigError, match="at least 1"):
        prepare(TAGS(masks=0), split, small(split))
    with pytest.raises(ConfigError, match="kept at least 1"):
        HardCandidates(kept=0)
    with pytest.raises(TrainingError, match="training run"):
        TAGS().compute(torch.zeros(2, 2), torch.eye(2).bool(), Context())
    with pytest.raises(TrainingError, match="run only"):
        HardCandidates().compute(torch.zeros(2, 2), torch.eye(2).bool(), Context())


def test_the_vocabulary_of_the_heads_is_that_of_the_data(split) -> None:
    model = small(split)
    assert model.matcher.heads["mlm"].bias.shape == (len(model.text),)
    assert model.spec.matcher["vocabulary"] == len(model.text)


# --- runs -----------------------------------------------------------------------------------


OBJECTIVE = {
    "hard-candidates": {"kept": 4},
    "tags-dc": {**SMALL, "mlm": 1.0, "rank": 1.0, "discrimination": 1.0, "correction": 1.0},
}


def settings(objective: dict, epochs: int, lr: float = 5e-3):
    train = {"epochs": epochs, "batch_size": 16, "log_every": 1, "optimizer": {"lr": lr}}
    return build_config(
        tree(dropout=0.1, train=train, objective=objective, evaluation={"bootstrap": 0})
    )


def steps(folder) -> list[dict]:
    records = [json.loads(line) for line in metrics(folder).splitlines()]
    return [record for record in records if record["kind"] == "step"]


def mean_of(records: list[dict], key: str) -> float:
    return float(np.mean([record[key] for record in records]))


@pytest.mark.slow
def test_a_run_learns_to_fill_to_tell_and_to_correct(concepts, tmp_path) -> None:
    trainer(some_of(concepts), tmp_path, settings(OBJECTIVE, epochs=8)).run()
    records = steps(tmp_path)
    first, last = records[:3], records[-3:]
    assert mean_of(last, "tags/mlm") < 0.85 * mean_of(first, "tags/mlm")
    assert mean_of(last, "tags/correction") < mean_of(first, "tags/correction")
    assert mean_of(last, "tags/discrimination") < mean_of(first, "tags/discrimination")
    assert all(0 <= record["tags/accuracy"] <= 1 for record in records)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_bytes(concepts, tmp_path) -> None:
    pairs = some_of(concepts)
    trainer(pairs, tmp_path / "whole", settings(OBJECTIVE, epochs=2)).run()
    command = iter([False, False, True])
    half = trainer(
        pairs, tmp_path / "parts", settings(OBJECTIVE, epochs=2), should_stop=lambda: next(command)
    )
    assert half.run().interrupted
    trainer(pairs, tmp_path / "parts", settings(OBJECTIVE, epochs=2)).run(resume=True)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_a_frozen_generator_writes_and_is_not_trained(concepts, tmp_path) -> None:
    pairs: Pairs = some_of(concepts)
    trainer(pairs, tmp_path / "first", settings({"tags": SMALL}, epochs=1)).run()
    static = {"tags": {**SMALL, "generator": str(tmp_path / "first")}}
    second = trainer(pairs, tmp_path / "second", settings(static, epochs=1))
    (term,) = second.objective.terms.values()
    frozen = term._generator.generator
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not set(map(id, frozen.parameters())) & {
        id(p) for group in second.updates.optimizer.param_groups for p in group["params"]
    }
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    command = SimpleNamespace(times=0)
    frozen.matcher.heads["mlm"].register_forward_pre_hook(
        lambda *_: setattr(command, "times", command.times + 1)
    )
    second.run()
    assert command.times == len(steps(tmp_path / "second"))
    assert all(value.equal(frozen.state_dict()[name]) for name, value in before.items())


def test_a_step_in_half_precision_is_finite_and_reaches_the_heads(split) -> None:
    model = small(split)
    objective = TAGSDC(**SMALL)
    prepare(objective, split, model)
    batch = batch_of(split, model, [0, 3, 5])
    loss, _ = TrainingStep(model.train(), objective, torch.bfloat16)(batch, 0, 0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model.matcher.heads["correction"].dense.weight.grad.abs().sum() > 0
