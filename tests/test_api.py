"""What other people's code types: `import counterfoil as cf`."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tempfile
import webbrowser
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import counterfoil as cf
from counterfoil.core.config import load_config
from counterfoil.core.errors import ArgumentError, CheckpointError, ConfigError, DataError
from counterfoil.data.fragments import Fragments
from counterfoil.models.match import Match, WordEffect
from tests.models.duals import photo_pairs, save_dual

TEXTS = ["a red bicycle", "two cows next to a tree"]


@pytest.fixture(scope="module")
def pairs(cache):
    return cf.load_pairs("scenes", images=40, cache_dir=cache)


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    """A run of one epoch, trained as a program would."""
    folder = tmp_path_factory.mktemp("runs") / "scan"
    model = cf.create("scan-t2i", pairs, embed_size=32)
    return cf.train(model, pairs, "selhn", folder=folder, epochs=1, batch_size=16)


@pytest.fixture(scope="module")
def model(run):
    return cf.load(run.folder, device="cpu")


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photos") / "a.png"
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_public_names_are_offered_and_resolve() -> None:
    assert set(cf.__all__) <= set(dir(cf))
    for name in cf.__all__:
        assert getattr(cf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = cf.lod


def test_import_and_completion_import_no_torch() -> None:
    code = "import counterfoil as cf, sys; dir(cf); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_names_are_listed_by_pattern() -> None:
    assert set(cf.list_models("sc*")) >= {"scan", "scan-t2i"}
    assert all(name.startswith("sc") for name in cf.list_models("sc*"))
    assert set(cf.list_objectives()) == set(cf.objectives.objectives)
    assert cf.list_matchers("na?f") == ["naaf"]
    assert cf.list_models("nothing*") == []


def test_classes_are_exported_by_their_packages() -> None:
    for package, registry in [
        (cf.objectives, cf.objectives.objectives),
        (cf.matchers, cf.matchers.matchers),
    ]:
        for name in registry:
            assert getattr(package, registry[name].__name__) is registry[name]


def test_a_run_its_best_checkpoint_and_a_saved_copy_are_the_same_model(
    run, model, photo, tmp_path
) -> None:
    cf.save_pretrained(model, tmp_path / "copy")
    expected = model.score(photo, TEXTS)
    for folder in (run.folder, run.folder / "best", tmp_path / "copy"):
        assert torch.equal(cf.load(folder, device="cpu").score(photo, TEXTS), expected)
        assert torch.equal(cf.from_pretrained(folder).score(photo, TEXTS), expected)


def test_images_are_read_from_whatever_holds_them(model, photo) -> None:
    fragments = model.reader.fragments(photo)
    opened = Image.open(photo)
    images = [photo, str(photo), opened, opened.convert("RGBA"), np.asarray(opened), fragments]
    images += [fragments.features, torch.from_numpy(fragments.features)]
    scores = model.score(images, TEXTS)
    assert scores.shape == (len(images), 2)
    assert torch.equal(scores, scores[:1].expand_as(scores))
    alone = model.score(photo, TEXTS[0])  # a product of another shape: the last bit may differ
    assert torch.allclose(alone, scores[:1, :1], rtol=0, atol=1e-6)


def test_batches_change_no_score(model, photo, pairs) -> None:
    images = [pairs.test.fragments.read(i) for i in range(4)] + [photo]
    texts = pairs.test.texts[:7]
    whole = model.score(images, texts)
    assert torch.allclose(model.score(images, texts, batch_size=2), whole, atol=1e-6)
    encoded = model.encode_images(images, batch_size=2), model.encode_texts(texts, batch_size=3)
    assert (len(encoded[0]), len(encoded[1])) == (5, 7)
    assert torch.allclose(model.matcher(*encoded), whole, atol=1e-6)
    assert not encoded[0].fragments.requires_grad


def test_a_matcher_reads_what_a_model_encoded_as_plain_tensors(model, photo) -> None:
    images, texts = model.encode_images(photo), model.encode_texts(TEXTS)
    plain = model.matcher(images.fragments, texts.fragments, images.mask, texts.mask)
    assert torch.equal(plain.detach(), model.score(photo, TEXTS))


def test_progress_is_told_while_images_are_encoded(model, photo) -> None:
    from counterfoil.core.progress import Silent

    titles = []

    class Noting(Silent):
        def track(self, items, description, total=None, done=0):
            titles.append((description, total))
            yield from items

    model.score([photo] * 3, TEXTS, batch_size=2, progress=Noting())
    assert titles == [("encoding texts", 1), ("encoding images", 2)]


@pytest.mark.parametrize(
    ("images", "texts", "error", "message"),
    [
        ([], TEXTS, ArgumentError, "images: expected at least one"),
        ("nowhere.jpg", TEXTS, DataError, "nowhere.jpg"),
        ([3], TEXTS, ArgumentError, "expected a path, a PIL image, .* got int"),
        (np.zeros((2, 5)), TEXTS, ArgumentError, r"fragments \[n, \d+\].*float64 \[2, 5\]"),
        (np.zeros((2, 5), dtype=int), TEXTS, ArgumentError, r"got int64 \[2, 5\]"),
        (Fragments(np.zeros((2, 5), np.float32)), TEXTS, DataError, "these have 5"),
        (Image.new("RGB", (32, 32)), [], ArgumentError, "texts: expected at least one"),
        (Image.new("RGB", (32, 32)), ["xyzzy"], DataError, "xyzzy"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_a_reason(
    model, images, texts, error, message
) -> None:
    with pytest.raises(error, match=message):
        model.score(images, texts)


def test_a_batch_size_below_one_is_refused(model, photo) -> None:
    with pytest.raises(ArgumentError, match="batch_size: expected at least 1, got 0"):
        model.score(photo, TEXTS, batch_size=0)
    with pytest.raises(ArgumentError, match=r"batch_size: expected at least 1, got 1\.5"):
        model.score(photo, TEXTS, batch_size=1.5)


def test_a_model_of_precomputed_features_says_that_it_reads_no_pixels(model, photo) -> None:
    other = copy.deepcopy(model)
    other.fragments_from = None
    with pytest.raises(ConfigError, match="precomputed features"):
        other.score(photo, TEXTS)
    fragments = model.reader.fragments(photo)
    assert torch.equal(other.score(fragments, TEXTS), model.score(photo, TEXTS))


def test_an_explanation_shows_itself(model, photo) -> None:
    match = model.explain(photo, "a tree & two cows")
    assert match.score == pytest.approx(float(model.score(photo, "a tree & two cows")), abs=1e-5)
    assert repr(match).startswith("Match('a tree & two cows', score=")
    page = match._repr_html_()
    assert page.count("<span") == len(match.words)
    assert "data:image/png;base64," in page
    assert "&amp;" in page
    assert "<img" not in model.explain(model.reader.fragments(photo), "a tree")._repr_html_()


def test_html_of_a_caption_is_escaped() -> None:
    word = WordEffect("<b>", -0.5, 0.0, -0.5, None, (0, 3))
    page = Match("<b> <script>", 0.1, [word], [], "parts", True)._repr_html_()
    assert "<script>" not in page
    assert "<b>" not in page


def test_show_opens_a_page_in_the_browser(model, photo, tmp_path, monkeypatch) -> None:
    copier = tmp_path / "browser.py"
    copier.write_text(
        "import shutil, sys, urllib.request\n"
        f"with urllib.request.urlopen(sys.argv[1]) as page, open({str(tmp_path / 'seen')!r}, 'wb') "
        "as file:\n    shutil.copyfileobj(page, file)\n"
    )
    browser = webbrowser.GenericBrowser([sys.executable, str(copier), "%s"])
    monkeypatch.setattr(webbrowser, "_tryorder", ["copier"])
    monkeypatch.setattr(webbrowser, "_browsers", {"copier": [None, browser]})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    match = model.explain(photo, "a tree")
    match.show()
    assert match._repr_html_() in (tmp_path / "seen").read_text(encoding="utf-8")


def test_reprs_are_short(pairs, run, model) -> None:
    assert re.fullmatch(r"Pairs\('scenes', train=\d+, dev=\d+, test=\d+\)", repr(pairs))
    assert re.fullmatch(
        r"Split\('test', \d+ images, \d+ captions, pixels, fragments\)", repr(pairs.test)
    )
    assert repr(run).startswith(f"RunResult('{run.folder}', best RSUM ")
    assert len(repr(run)) < 200


@pytest.mark.parametrize(
    ("objective", "settings", "changed"),
    [
        ("selhn", {"epochs": 3, "batch_size": 16}, "train.epochs"),
        ("hardest", {"epochs": 1, "batch_size": 16}, "objective.hardest, objective.selhn"),
        ("selhn", {"epochs": 1, "batch_size": 8, "seed": 4}, "train.batch_size, seed"),
    ],
)
def test_a_run_is_resumed_with_its_own_settings_only(
    pairs, run, objective, settings, changed
) -> None:
    model = cf.create("scan-t2i", pairs, embed_size=32)
    message = f"started with another {re.escape(changed)}; .* overwrite=True or in another folder"
    with pytest.raises(ConfigError, match=message):
        cf.train(model, pairs, objective, folder=run.folder, resume=True, **settings)


def test_training_refuses_settings_without_effect_and_writes_nothing(pairs, tmp_path) -> None:
    model = cf.create("scan-t2i", pairs, embed_size=32)
    with pytest.raises(ConfigError, match=r"momentum=0\.5 has no effect with .*name=adamw"):
        cf.train(model, pairs, folder=tmp_path / "run", optimizer={"momentum": 0.5})
    with pytest.raises(ConfigError, match=r"drop_regions_varying=true has no effect"):
        cf.train(model, pairs, folder=tmp_path / "run", data={"drop_regions_varying": True})
    assert not (tmp_path / "run").exists()


def test_an_objective_is_named_not_built(model, pairs, tmp_path) -> None:
    with pytest.raises(ArgumentError, match=r"objective: expected a name .* got SelHN"):
        cf.train(model, pairs, objective=cf.objectives.SelHN(), folder=tmp_path / "run")


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_to_the_same_end(pairs, tmp_path) -> None:
    from counterfoil.core.progress import Silent

    class Interrupting(Silent):
        def track(self, items, description, total=None, done=0):
            if description.startswith("epoch 2"):
                raise KeyboardInterrupt
            yield from items

    def train(name, **settings):
        model = cf.create("scan-t2i", pairs, embed_size=32)
        settings = {"folder": tmp_path / name, "epochs": 2, "batch_size": 16, **settings}
        return cf.train(model, pairs, "selhn", **settings)

    train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("cut", progress=Interrupting())
    train("cut", resume=True)
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]


def test_a_run_is_resumed_with_its_own_model_only(pairs, run, model) -> None:
    settings = {"folder": run.folder, "resume": True, "epochs": 1, "batch_size": 16}
    other = cf.create("scan-t2i", pairs, embed_size=16)
    with pytest.raises(ConfigError, match=r"started with another model\.embed_size; "):
        cf.train(other, pairs, "selhn", **settings)
    again = cf.train(copy.deepcopy(model), pairs, "selhn", **settings, log_every=3)
    assert (again.steps, again.best_rsum) == (run.steps, run.best_rsum)


def test_a_folder_without_a_run_cannot_be_resumed(pairs, tmp_path) -> None:
    model = cf.create("scan-t2i", pairs, embed_size=32)
    with pytest.raises(CheckpointError, match=r"not a run .* nothing to resume"):
        cf.train(model, pairs, folder=tmp_path, resume=True)


def test_a_refused_resume_leaves_the_run_as_it_was(pairs, tmp_path) -> None:
    settings = {"folder": tmp_path / "run", "epochs": 1, "batch_size": 32, "progress": False}
    undivided = replace(pairs, splits={"train": pairs.train, "test": pairs.test})
    model = cf.create("vse-fc", undivided, embed_size=16)
    cf.train(model, undivided, "triplet", **settings)
    saved = (tmp_path / "run" / "dev_split.json").read_bytes()
    aside = json.loads(saved)["ids"]
    lost = {aside[0], next(one for one in pairs.train.ids if one not in aside)}  # dev changes, too
    left = [number for number, one in enumerate(pairs.train.ids) if one not in lost]
    fewer = replace(undivided, splits={**undivided.splits, "train": pairs.train.select(left)})
    with pytest.raises(DataError, match="no longer those that the run began with"):
        cf.train(copy.deepcopy(model), fewer, "triplet", resume=True, **settings)
    assert (tmp_path / "run" / "dev_split.json").read_bytes() == saved
    cf.train(copy.deepcopy(model), undivided, "triplet", resume=True, **settings)
    with pytest.raises(ArgumentError, match="resume=True continues a run, overwrite=True replaces"):
        cf.train(model, undivided, "triplet", resume=True, overwrite=True, **settings)


@pytest.mark.slow
def test_the_config_of_a_run_says_how_its_model_was_made(pairs, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"embed_size": 16, "ensemble_size": 2}
    settings = {"epochs": 1, "batch_size": 80}
    cf.train(cf.create("vse-fc", pairs, **options), pairs, folder="first", **settings)
    model = cf.create("vse-fc", pairs, init_from="first", **options)
    cf.train(model, pairs, folder="second", **settings)
    cf.train(model, pairs, folder="third", **settings)
    made = [load_config(tmp_path / name / "config.yaml").model for name in ("second", "third")]
    assert [one.ensemble_size for one in made] == [2, 2]
    assert [one.init_from for one in made] == [str(tmp_path / "first"), None]


@pytest.mark.slow
def test_noise_shuffles_the_captions_that_a_run_is_trained_on(pairs, tmp_path) -> None:
    def losses(name, **data):
        model = cf.create("vse-fc", pairs, embed_size=16)
        settings = {"folder": tmp_path / name, "epochs": 1, "batch_size": 80}
        cf.train(model, pairs, data=data, **settings)
        return (tmp_path / name / "metrics.jsonl").read_text()

    texts = list(pairs.train.texts)
    clean, noisy = losses("clean"), losses("noisy", noise=0.5)
    assert noisy != clean
    index = np.load(tmp_path / "noisy" / "noise.npy")
    assert 0 < (index != np.arange(len(index))).sum() <= len(index) / 2
    assert losses("again", noise_index=str(tmp_path / "noisy" / "noise.npy")) == noisy
    assert list(pairs.train.texts) == texts


@pytest.mark.parametrize(
    ("key", "value", "call"),
    [
        ("source", "f30k", r"load_pairs\(source\)"),
        ("format", "json", r"load_pairs\(source, format\)"),
        ("options", {"images": 9}, r"load_pairs\(source, \*\*options\)"),
        ("features", {"extractor": "grid"}, r"load_pairs\(source, extractor=…\)"),
        ("min_count", 2, r"create_model\(.*min_count=…\)\)"),
        ("vocabulary", "words.json", r"create_model\(.*vocabulary=…\)\)"),
    ],
)
def test_data_settings_that_training_cannot_change_are_refused(
    pairs, model, tmp_path, key, value, call
) -> None:
    with pytest.raises(ArgumentError, match=f"{key}.*; set it with .*{call}"):
        cf.train(copy.deepcopy(model), pairs, folder=tmp_path / "run", data={key: value})
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else_is_not_trained_in(pairs, model, tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        message = r"not a run \(it holds thesis.txt\).*; choose another folder$"
        with pytest.raises(ConfigError, match=message):
            cf.train(copy.deepcopy(model), pairs, folder=tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_existing_run_is_not_overwritten_unasked(pairs, run, model) -> None:
    with pytest.raises(ConfigError, match=r"already holds a run: resume=True .* overwrite=True"):
        cf.train(copy.deepcopy(model), pairs, folder=run.folder)
    assert cf.load(run.folder) is not None


def test_progress_and_batch_sizes_are_read_the_same_everywhere(model, pairs) -> None:
    for shown in (True, False, None):
        assert cf.evaluate(model, pairs.test, progress=shown, bootstrap=0).rsum > 0
        cf.load_pairs("scenes", images=[4, 4, 4], progress=shown)
    for call in (cf.evaluate, cf.load_pairs):
        given = (model, pairs.test) if call is cf.evaluate else ("scenes",)
        with pytest.raises(ArgumentError, match="progress: expected True, False or an object"):
            call(*given, progress="no")
    for size in (0, -1, "a", 2.5, None):
        with pytest.raises(ArgumentError, match="batch_size: expected at least 1, got"):
            cf.evaluate(model, pairs.test, batch_size=size)


def test_evaluate_wants_one_split(model, pairs) -> None:
    with pytest.raises(ArgumentError, match=r"expected one split, such as pairs.train, got Pairs"):
        cf.evaluate(model, pairs)
    assert cf.evaluate(model, pairs.test, bootstrap=0) is not None


def test_models_and_pairs_of_the_wrong_type_are_refused_with_what_was_given(
    model, pairs, tmp_path
) -> None:
    for given in (None, "runs/a", [model, "runs/a"]):
        with pytest.raises(ArgumentError, match="evaluate: expected a model or several"):
            cf.evaluate(given, pairs.test)
    with pytest.raises(ArgumentError, match=r"train: expected a model .* got 'runs/a'"):
        cf.train("runs/a", pairs, folder=tmp_path)
    with pytest.raises(ArgumentError, match=r"train: expected all pairs .* got Split\('train'"):
        cf.train(model, pairs.train, folder=tmp_path)
    with pytest.raises(ArgumentError, match=r"create: expected all pairs .* got Split\('train'"):
        cf.create("naaf", pairs.train)


def test_load_says_what_it_tried(tmp_path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"no such folder, not a pretrained model .*, and not a name on the hub",
    ):
        cf.load(tmp_path / "nothing" / "here" / "at-all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither a run nor a saved model"):
        cf.load(tmp_path / "empty")


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_published_dual_encoder_is_loaded_without_training(kind, tmp_path) -> None:
    from transformers import AutoModel

    folder = save_dual(tmp_path / "dual", kind)
    model = cf.load(folder, device="cpu")
    pairs = photo_pairs(tmp_path / "photos")
    image = pairs.test.pixels[0].path
    texts = ["a dog", "a cat near the tree"]
    scores = model.score(image, texts)
    own = AutoModel.from_pretrained(folder).eval()
    pixels = model.image_encoder.pixels(
        torch.from_numpy(model.reader.fragments(image).features)[None]
    )
    with torch.inference_mode():
        vision = own.get_image_features(pixel_values=pixels)
    vision = getattr(vision, "pooler_output", vision)
    expected = torch.nn.functional.normalize(vision, dim=-1)
    assert torch.allclose(model.encode_images(image).pooled, expected, atol=1e-5)
    cf.save_pretrained(model, tmp_path / "saved")
    again = cf.load(tmp_path / "saved", device="cpu")
    assert torch.equal(again.score(image, texts), scores)


def test_the_extra_all_installs_every_extra_that_an_error_names() -> None:
    root = Path(__file__).parents[1]
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = ", section, flags=re.MULTILINE)) - {"all", "docs", "dev"}
    listed = re.search(r"^all = \[(.*?)^\]", section, flags=re.MULTILINE | re.DOTALL)
    parts = re.findall(r'"counterfoil\[(.*)\]"', listed[1])
    assert {name for part in parts for name in part.split(",")} == extras
    named = set()
    for path in (root / "src").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'MissingExtraError\(\s*"[^"]+",\s*"([\w-]+)"', source))
    assert named
    assert named <= extras


def test_saving_a_model_replaces_nothing_but_a_saved_model(concepts, tmp_path) -> None:
    model = cf.create("vse-fc", concepts, embed_size=8)
    folder = tmp_path / "mine"
    folder.mkdir()
    cf.save_pretrained(model, folder)  # empty
    cf.save_pretrained(model, folder)  # a saved model
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ArgumentError, match="not empty and not a saved model"):
        cf.save_pretrained(model, folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match="not empty"):
        cf.save_pretrained(model, tmp_path / "file")
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_a_mistyped_run_is_not_looked_for_on_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match="runs/typo: no such folder"):
        cf.load("runs/typo")


def test_what_is_no_path_model_or_split_is_refused_by_name(model, tmp_path) -> None:
    for call in (cf.load, cf.load_pairs, cf.open_index, cf.from_pretrained):
        with pytest.raises(ValueError, match=f"{call.__name__}: expected a path or a name, got"):
            call(None)
    with pytest.raises(ValueError, match="save_pretrained: expected a path or a name, got"):
        cf.save_pretrained(model, None)
    with pytest.raises(ValueError, match="expected a model and a folder, got str first"):
        cf.save_pretrained("model", tmp_path / "copy")
