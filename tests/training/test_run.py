"""Runs from the command line down: what is refused before work begins, and several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from counterfoil.api import train
from counterfoil.core.config import build_config, merge
from counterfoil.core.errors import ConfigError, CounterfoilError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.pairs import Pairs
from counterfoil.features import with_fragments
from counterfoil.models.store import save_pretrained
from counterfoil.models.yardstick import measure_yardstick
from counterfoil.training.checkpoint import Checkpoints, Position
from counterfoil.training.run import execute, new_model
from counterfoil.training.run_data import data_for_run, read_data, shared_train_split
from counterfoil.training.run_folder import clear_run, holds_a_run, load_model, resolve_paths
from tests.features.tiny_networks import photos as write_photos
from tests.models.test_explain import make
from tests.training.test_run_folder import children

SMALL = [
    "data.options.images=100", "data.min_count=1", "model.embed_size=16", "model.text.word_dim=8",
    "train.batch_size=16", "train.epochs=3", "train.save_every=1", "evaluation.bootstrap=0",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def launch(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, "-m", "counterfoil", "train", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


@pytest.mark.slow
def test_torchrun_starts_two_processes_on_a_cold_cache(tmp_path) -> None:
    short = [*SMALL, "data.options.images=20", "train.epochs=1", "evaluation.test_split=dev"]
    started = launch(*short, "--out", tmp_path / "run", "--cache", tmp_path / "cache")
    out, err = started.communicate(timeout=200)
    assert started.returncode == 0, out + err[-3000:]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [record["kind"] for record in records].count("epoch") == 1  # one of the two writes
    assert (tmp_path / "run" / "results.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_two_processes_start_on_a_cold_cache_and_resume_after_a_kill(tmp_path) -> None:
    cache = ["--cache", tmp_path / "cache"]
    whole = launch(*SMALL, "--out", tmp_path / "whole", *cache)
    out, err = whole.communicate(timeout=200)
    assert whole.returncode == 0, err[-3000:]
    cut = launch(*SMALL, "--out", tmp_path / "cut", *cache)
    while not (tmp_path / "cut" / "last").exists() and cut.poll() is None:
        time.sleep(0.02)
    for pid in [cut.pid, *descendants(cut.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cut.communicate(timeout=60)
    again = launch("--resume", tmp_path / "cut", *cache)
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0, out + err[-3000:]
    for name in ("metrics.jsonl", "results.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("names", [["thesis.txt"], ["config.yaml", "thesis.txt"], ["last"]])
def test_a_folder_that_is_not_a_run_is_never_deleted(tmp_path, names) -> None:
    for name in names:
        (tmp_path / name).write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="not a run"):
        clear_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_the_working_directory_is_never_deleted(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not deleted"):
        clear_run(Path())


def photos(folder: Path, splits: list[str]) -> Path:
    rows = ["image,caption,split"]
    for number, split in enumerate(splits):
        Image.new("RGB", (32, 32), (number * 9 % 255, 90, 30)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,a picture number {number},{split}")
    (folder / "captions.csv").write_text("\n".join(rows))
    return folder / "captions.csv"


def test_a_missing_split_is_found_before_anything_is_extracted(tmp_path) -> None:
    source = photos(tmp_path, ["train"] * 6 + ["test"] * 2)
    config = build_config({"data": {"source": str(source), "dev_share": 0.0}})
    with pytest.raises(DataError, match=r"no split 'dev', which evaluation\.split names"):
        execute(config, tmp_path / "run", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def tiny(source: Path, **data: object) -> dict[str, Any]:
    return {
        "data": {"source": str(source), "min_count": 1, **data},
        "model": {"name": "vse-fc", "embed_size": 8},
        "train": {"epochs": 1, "batch_size": 4},
        "evaluation": {"bootstrap": 0},
    }


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_data_without_a_dev_split_can_be_trained_on(tmp_path) -> None:
    source = photos(tmp_path, ["train"] * 12 + ["test"] * 2 + ["trian"])
    run, lines = tmp_path / "run", Lines()
    finished = execute(build_config(tiny(source)), run, tmp_path / "cache", progress=lines)
    assert len(finished.pairs.train) == 10
    assert sum("2 of 12 training images" in line for line in lines.lines) == 1
    assert sum("split 'trian' is not a usual name" in line for line in lines.lines) == 1
    dev = set(finished.pairs.dev.ids)
    assert not dev & set(finished.pairs.train.ids)
    # evaluate, audit and index of that run, on its data by default or by name, see the same split
    for data in (None, str(source)):
        again = data_for_run(run, data, None, {}, tmp_path / "cache", Silent())
        assert set(again.dev.ids) == dev
        assert set(again.train.ids) == set(finished.pairs.train.ids)
    assert set(shared_train_split([run], tmp_path / "cache", Silent()).ids) == set(again.train.ids)


def test_features_are_extracted_of_the_named_splits_only(tmp_path) -> None:
    source = photos(tmp_path, ["train"] * 12 + ["test"] * 2 + ["extra"] * 3)
    run = tmp_path / "run"
    execute(build_config(tiny(source)), run, tmp_path / "cache")

    def read(*splits: str) -> tuple[set[str], Pairs]:
        """The splits with fragments, and the data set."""
        cache = tmp_path / "-".join(("cache", *splits))
        pairs = data_for_run(run, str(source), None, {}, cache, Silent(), splits)
        return {one.name for one in pairs if one.fragments is not None}, pairs

    with_fragments, pairs = read("test")
    assert with_fragments == {"test"}
    assert set(pairs.splits) == {"train", "dev", "test", "extra"}  # their captions are there
    assert read("extra", "test")[0] == {"extra", "test"}
    # this dev split was set aside from the training images
    assert read("dev")[0] == {"train", "dev"}
    with pytest.raises(DataError, match=r"no split 'tset'.*test"):
        read("tset")
    assert not list(tmp_path.glob("cache-tset/**/*.npy"))  # refused before anything is extracted


def test_a_model_of_unknown_features_is_refused_before_images_are_read(tmp_path, concepts) -> None:
    save_pretrained(make("scan-t2i", concepts), tmp_path / "imported")
    source, cache = photos(tmp_path, ["test"] * 3), tmp_path / "cache"
    with pytest.raises(DataError, match=r"does not say whose; those of 'segments'.* have \d+"):
        data_for_run(tmp_path / "imported", str(source), None, {}, cache, Silent())
    assert not list(cache.glob("**/*.npy"))


def test_a_run_whose_data_have_changed_goes_on_once_they_are_restored(tmp_path) -> None:
    source = photos(tmp_path, ["train"] * 12)
    run, cache = tmp_path / "run", tmp_path / "cache"
    config = build_config(tiny(source))
    dev = set(execute(config, run, cache).pairs.dev.ids)
    kept = {name: (run / name).read_bytes() for name in ("dev_split.json", "last/config.json")}
    rows = source.read_text().splitlines(keepends=True)
    of_train, of_dev = (
        next(row for row in rows[1:] if (row.partition(".")[0] in dev) is held)
        for held in (False, True)
    )
    for lost in ([of_train], [of_train, of_dev]):
        source.write_text("".join(row for row in rows if row not in lost))
        with pytest.raises(DataError, match="no longer those that the run began with"):
            execute(config, run, cache, resume=True)
        assert kept == {name: (run / name).read_bytes() for name in kept}
    photos(tmp_path, ["train"] * 60)
    with pytest.raises(DataError, match="no longer those that the run began with"):
        execute(config, run, cache, resume=True)
    grown = data_for_run(run, None, None, {}, cache, Silent())
    assert set(grown.dev.ids) == dev  # what was added is not evaluated as dev
    assert len(grown.train) == 58
    source.write_text("".join(rows))
    assert set(execute(config, run, cache, resume=True).pairs.dev.ids) == dev


def test_a_split_named_in_the_config_is_taken_and_nothing_is_set_aside(tmp_path) -> None:
    source = photos(tmp_path, ["train"] * 6 + ["test"] * 2)
    config = build_config(merge(tiny(source), {"evaluation": {"split": "test"}}))
    pairs = read_data(config, tmp_path / "cache", Silent())
    assert {split.name: len(split) for split in pairs} == {"train": 6, "test": 2}
    assert len(read_data(build_config(tiny(source, dev_share=0.5)), tmp_path, Silent()).dev) > 1


def test_noise_is_put_into_training_captions_and_not_into_the_dev_images(tmp_path) -> None:
    source = photos(tmp_path, ["train"] * 20)
    pairs = read_data(build_config(tiny(source, noise=1.0)), tmp_path / "cache", Silent())
    for image, captions in zip(pairs.dev.ids, pairs.dev.captions, strict=True):
        assert captions == [f"a picture number {image}"]
    assert pairs.train.captions[0] != [f"a picture number {pairs.train.ids[0]}"]


@pytest.mark.parametrize(
    "change",
    [
        {"evaluation": {"split": "nowhere"}},
        {"data": {"source": "no/such/data"}},
        {"objective": {"hardest": {"epochs": [5, 6]}}},
        {"data": {"noise": 0.5, "noise_index": "none.npy"}},
    ],
)
def test_a_failed_run_leaves_no_folder(tmp_path, change) -> None:
    source = photos(tmp_path, ["train"] * 6)
    config = build_config(merge(tiny(source), change))
    with pytest.raises(CounterfoilError):
        execute(config, tmp_path / "runs" / "run", tmp_path / "cache")
    assert not (tmp_path / "runs" / "run").exists()


def test_a_failure_takes_nothing_from_a_folder_that_was_there(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    config = build_config(tiny(tmp_path / "nowhere"))
    with pytest.raises(CounterfoilError):
        execute(config, run, tmp_path / "cache")
    assert (run / "notes.txt").read_text() == "mine"


def test_a_split_name_cannot_leave_the_cache(tmp_path) -> None:
    source = photos(tmp_path, ["train", "dev", "../../evil"])
    with pytest.raises(DataError, match="bad-split-name"):
        execute(build_config({"data": {"source": str(source)}}), tmp_path / "r", tmp_path / "c")


def test_features_of_different_widths_are_refused(tmp_path) -> None:
    for split, width in {"train": 8, "dev": 16}.items():
        np.save(tmp_path / f"{split}_ims.npy", np.ones((4, 3, width), np.float32))
        (tmp_path / f"{split}_caps.txt").write_text("a b\nc d\ne f\ng h\n")
    config = build_config({"data": {"source": str(tmp_path)}})
    with pytest.raises(DataError, match="different widths"):
        read_data(config, tmp_path / "cache", Silent())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"device": "gpu"}}, "device 'gpu'"),
        ({"model": "rvse-mpl"}, "did you mean 'rvse-mlp'"),
        ({"objective": {"hardest": "abc"}}, r"objective\.hardest"),
    ],
)
def test_a_wrong_name_is_found_before_any_work(tmp_path, change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        execute(build_config(change), tmp_path / "run", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_paths_of_a_run_hold_from_anywhere(tmp_path, monkeypatch) -> None:
    source = photos(tmp_path, ["train"])
    monkeypatch.chdir(tmp_path)
    config = resolve_paths(build_config({"data": {"source": "captions.csv"}}))
    assert config.data.source == str(source.resolve())
    assert resolve_paths(build_config({})).data.source == "scenes"


def test_every_image_left_out_is_counted_once(tmp_path) -> None:
    source = photos(tmp_path, ["train"] * 12 + ["dev"] * 3 + ["test"] * 3)
    (tmp_path / "3.png").write_bytes(b"broken")
    text = source.read_text().replace("a picture number 5", "")
    source.write_text(text)
    config = build_config(
        {
            "data": {"source": str(source), "min_count": 1},
            "model": {"name": "vse-fc", "embed_size": 8},
            "train": {"epochs": 2, "batch_size": 4},
            "evaluation": {"bootstrap": 0},
        }
    )
    from counterfoil.training.run_data import skipped_kinds

    finished = execute(config, tmp_path / "run", tmp_path / "cache")
    assert sum(skipped_kinds(finished.pairs).values()) == 3  # a caption, its image, a broken image
    assert "empty-caption" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_what_is_judged_on_dev_is_what_chose_the_epoch(tmp_path) -> None:
    settings = {
        "data": {"options": {"images": [24, 9, 8]}, "min_count": 1, "captions": "one"},
        "model": {"name": "vse-fc", "embed_size": 16},
        "train": {"epochs": 2, "batch_size": 8},
        "evaluation": {"bootstrap": 0, "max_images": 3, "test_split": "dev"},
    }
    finished = execute(build_config(settings), tmp_path / "run", tmp_path / "cache")
    assert finished.report is not None
    assert finished.report.images == 3
    assert finished.report.rsum == pytest.approx(finished.result.best_rsum)
    settings["evaluation"]["test_split"] = "test"
    finished = execute(build_config(settings), tmp_path / "other", tmp_path / "cache")
    assert finished.report is not None
    assert finished.report.images == 8


def test_a_run_keeps_a_yardstick_measured_on_dev_and_works_without_it(tmp_path) -> None:
    settings = {
        "data": {"source": "scenes", "options": {"images": [16, 6, 4]}, "min_count": 1},
        "model": {"name": "vse-fc", "embed_size": 16, "text": {"word_dim": 8}},
        "train": {"epochs": 1, "batch_size": 16},
        "evaluation": {"bootstrap": 0},
    }
    finished = execute(build_config(settings), tmp_path / "run", tmp_path / "cache")
    model = load_model(tmp_path / "run", "cpu")
    assert model.yardstick == finished.model.yardstick
    assert (model.yardstick.split, model.yardstick.pairs) == ("dev", 2 * 30)
    (tmp_path / "run" / "yardstick.json").unlink()
    assert load_model(tmp_path / "run", "cpu").yardstick is None


def test_a_new_best_checkpoint_takes_away_what_was_measured_of_the_one_before(
    concepts, tmp_path
) -> None:
    checkpoints, model = Checkpoints(tmp_path), make("vse-fc", concepts)
    checkpoints.save(model, {}, Position(step=1), best=True)
    measured = [tmp_path / name for name in ("yardstick.json", "correction_rule.json")]
    for path in measured:
        path.write_text("{}")
    checkpoints.save(model, {}, Position(step=2))
    checkpoints.load()
    assert all(path.exists() for path in measured)
    checkpoints.save(model, {}, Position(step=3), best=True)
    assert not any(path.exists() for path in measured)


@pytest.mark.slow
def test_training_a_loaded_model_further_does_not_keep_its_yardstick(concepts, tmp_path) -> None:
    model = make("vse-fc", concepts)
    model.yardstick = measure_yardstick(model, concepts["dev"])
    few = replace(concepts, splits={**concepts.splits, "dev": concepts["dev"].select([0, 1])})
    train(model, few, folder=tmp_path / "run", epochs=1, batch_size=32)
    assert load_model(tmp_path / "run", "cpu").yardstick is None


@pytest.mark.slow
def test_a_run_with_all_that_it_measures_can_be_deleted(concepts, tmp_path) -> None:
    model = make("vse-fc", concepts)
    train(model, concepts, folder=tmp_path / "run", epochs=1, batch_size=32)
    assert (tmp_path / "run" / "yardstick.json").exists()
    (tmp_path / "run" / "correction_rule.json").write_text("{}")
    clear_run(tmp_path / "run")
    assert not holds_a_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("extracted", "name", "options"),
    [(True, "segments", {"side": 32}), (False, 'segments {"side": 48}', {})],
)
def test_a_model_has_the_options_of_the_features_that_it_read(
    tmp_path, extracted, name, options
) -> None:
    """Options of the config do not apply to features that came with the data."""
    config = build_config(
        {
            "data": {
                "min_count": 1,
                "features": {"extractor": "segments", "options": {"side": 32}},
            },
            "model": {"name": "vse-fc", "embed_size": 8, "text": {"word_dim": 4}},
        }
    )
    pairs = Pairs("some", {"train": write_photos(tmp_path / "photos", 4)})
    side = 32 if extracted else 48
    pairs = with_fragments(pairs, tmp_path / "cache", "segments", {"side": side})
    model = new_model(config, pairs, Silent(), tmp_path / "cache")
    assert (model.fragments_from, model.fragments_options) == (name, options)
    assert model.fragments_of(pairs.train) is pairs.train.fragments
