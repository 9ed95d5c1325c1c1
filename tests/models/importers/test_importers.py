"""Other projects' checkpoints: the same scores after import, and nothing hostile is run."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import struct
import types

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.data.text.vocabulary import MASK
from counterfoil.models import from_pretrained, save_pretrained
from counterfoil.models.importers import import_checkpoint, importers, read_checkpoint
from tests.conftest import assert_close, load_fixture, thinned
from tests.models.importers.test_uniter import FILES as STATE_DICTS
from tests.models.pickling import (
    Python2Pickler,
    Touch,
    content_of,
    fake_pickle,
    file_of,
    write,
)

FILES = {
    "scan": "scan",
    "naaf": "naaf",
    "naaf-glove": "naaf",
    "bfan": "bfan",
    "vse_infty": "vse_infty",
    "vse_infty-dataparallel": "vse_infty",
    "chan": "chan",
    "sgraf-sgr": "sgraf",
    "sgraf-saf": "sgraf",
}
ROWS = 40  # words in the embeddings of these files


def mask_of(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest)[None] < lengths[:, None]


def scores_of(model, fixture) -> torch.Tensor:
    images, ids = fixture["in.images"], fixture["in.token_ids"]
    whole = torch.full((len(images),), images.shape[1])
    regions = mask_of(fixture.tensors.get("in.img_lens", whole), images.shape[1])
    words = mask_of(fixture["in.cap_lens"], ids.shape[1])
    with torch.inference_mode():
        return model(ImageBatch(images, regions), TextBatch(ids, words))


def vocabulary_layout(words: int) -> dict:
    entries = ["<pad>", "<start>", "<end>", "<unk>", "dog", "café"]
    entries += [f"w{i}" for i in range(len(entries), words)]
    return {
        "word2idx": {word: number for number, word in enumerate(entries)},
        "idx2word": {str(number): word for number, word in enumerate(entries)},
        "idx": len(entries),
    }


def write_vocabulary(path, words: int):
    path.write_text(json.dumps(vocabulary_layout(words)), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FILES)
def test_an_imported_model_scores_as_the_original_did(name, tmp_path) -> None:
    imported = import_checkpoint(file_of(name), FILES[name])
    save_pretrained(imported.model, tmp_path / "m")
    fixture = load_fixture(f"{name}-checkpoint")
    assert_close(scores_of(from_pretrained(tmp_path / "m"), fixture), fixture["out.scores"])
    assert imported.epoch == fixture.hyper["epoch"]
    assert imported.best_rsum == fixture.hyper["best_rsum"]


def test_every_importer_has_a_file_to_be_compared_with() -> None:
    assert {*FILES.values(), *STATE_DICTS.values()} == set(importers)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", thinned(FILES, "scan", "vse_infty"))
def test_either_container_and_a_wrapped_model_give_the_same(name, legacy, tmp_path) -> None:
    content = content_of(name)
    content["model"] = [
        {f"module.{key.removeprefix('module.')}": value for key, value in state.items()}
        for state in content["model"]
    ]
    content["best_rsum"] = np.float64(301.5)
    path = write(content, tmp_path / "c.pth", legacy)
    imported = import_checkpoint(path, FILES[name])
    fixture = load_fixture(f"{name}-checkpoint")
    assert_close(scores_of(imported.model, fixture), fixture["out.scores"])
    assert imported.best_rsum == 301.5


@pytest.mark.parametrize("name", ["scan", "bfan", "vse_infty"])
def test_a_python_2_pickle_of_gpu_tensors_is_read(name, tmp_path) -> None:
    content = content_of(name)
    content["opt"].data_path = "/donn\xe9es"
    path = tmp_path / "old.pth.tar"
    write(content, path, legacy=True, pickle_module=fake_pickle(Python2Pickler))
    assert b"cuda:0" in path.read_bytes()
    assert b"torch.cuda\nFloatStorage" in path.read_bytes()
    assert read_checkpoint(path)["opt"].data_path == "/donn\xe9es"
    fixture = load_fixture(f"{name}-checkpoint")
    model = import_checkpoint(path, FILES[name]).model
    assert_close(scores_of(model, fixture), fixture["out.scores"])


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("scan", "sgraf", r"not a checkpoint of SGRAF.*2 instead of 3.*SCAN: --from scan"),
        ("scan", "naaf", r"not a checkpoint of NAAF \(it has no opt\.thres_safe\).*--from scan"),
        ("sgraf-sgr", "scan", r"3 instead of 2.*--from sgraf"),
        ("chan", "vse_infty", r"--from chan"),
        ("vse_infty", "bfan", r"no opt\.focal_type.*--from vse_infty"),
    ],
)
def test_the_wrong_family_is_named_and_the_right_one_offered(name, family, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(file_of(name), family)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown importer 'scam'; did you mean 'scan'"):
        import_checkpoint(file_of("scan"), "scam")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "'model' and 'opt', found list"),
        ({"state_dict": {}}, "found state_dict"),
        ({"model": {"fc.weight": torch.ones(1)}, "opt": {}}, "not a list of state dicts"),
        ({"model": [{"fc.weight": 3}], "opt": {}}, "not a list of state dicts"),
        ({"model": [], "opt": "t2i"}, "'opt' is a str"),
        ({"model": [{}], "opt": argparse.Namespace()}, "nor of any other family"),
    ],
)
def test_another_layout_is_named(content, message, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("scan", {"raw_feature_norm": "l1norm"}, r"opt\.raw_feature_norm='l1norm' is not supp"),
        ("scan", {"agg_func": "Median"}, r"opt\.agg_func='Median'.*LogSumExp, Mean"),
        ("scan", {"lambda_softmax": None}, r"opt\.lambda_softmax: expected a number, got None"),
        ("scan", {"no_imgnorm": "no"}, r"opt\.no_imgnorm: expected a switch"),
        ("bfan", {"focal_type": "some"}, r"opt\.focal_type='some'"),
        ("vse_infty", {"precomp_enc_type": "backbone"}, r"opt\.precomp_enc_type='backbone'"),
        ("chan", {"text_enc_type": "bert"}, r"opt\.text_enc_type='bert'"),
        ("sgraf-sgr", {"module_name": "SGX"}, r"opt\.module_name='SGX'.*SGR, SAF"),
        ("sgraf-sgr", {"module_name": "SAF"}, r"missing: .*SAF_module\.attn_sim_w\.weight"),
    ],
)
def test_a_setting_that_cannot_be_honored_is_refused(name, options, message, tmp_path) -> None:
    content = content_of(name)
    vars(content["opt"]).update(options)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(write(content, tmp_path / "c.pth"), FILES[name])


def test_a_setting_that_is_not_there_is_named(tmp_path) -> None:
    content = content_of("scan")
    del content["opt"].lambda_softmax
    with pytest.raises(CheckpointError, match=r"opt\.lambda_softmax is missing"):
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")


def test_missing_unknown_and_misshapen_weights_are_listed_by_their_own_names(tmp_path) -> None:
    content = content_of("scan")
    content["model"][0]["extra.weight"] = torch.ones(2)
    del content["model"][1]["rnn.bias_hh_l0"]
    message = r"missing: rnn\.bias_hh_l0 \(text encoder\); unknown: extra\.weight \(image encoder\)"
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")
    content = content_of("scan")
    content["model"][0]["fc.weight"] = torch.ones(7, 20)
    with pytest.raises(CheckpointError, match=r"fc\.weight .* shape \(7, 20\).* \(32, 20\)"):
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")


def test_sizes_that_do_not_belong_together_take_no_memory(tmp_path) -> None:
    content = content_of("scan")
    content["model"][0] = {"fc.weight": torch.ones(1, 60_000), "fc.bias": torch.ones(60_000)}
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")


def test_a_width_that_no_model_has_is_named(tmp_path) -> None:
    content = content_of("scan")
    content["model"][0] = {"fc.weight": torch.ones(1, 10**6), "fc.bias": torch.ones(10**6)}
    with pytest.raises(CheckpointError, match=r"invalid model \(embed_size: .*65536"):
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")


def test_scans_options_are_carried_over(tmp_path) -> None:
    content = content_of("scan")
    vars(content["opt"]).update(
        cross_attn="i2t",
        agg_func="Mean",
        raw_feature_norm="no_norm",
        lambda_softmax=4,
        no_imgnorm=True,
        precomp_enc_type="weight_norm",
    )
    weight = content["model"][0].pop("fc.weight")
    content["model"][0] |= {"fc.weight_g": weight.norm().reshape(1), "fc.weight_v": 3 * weight}
    for key in [key for key in content["model"][1] if key.endswith("_reverse")]:
        del content["model"][1][key]
    model = import_checkpoint(write(content, tmp_path / "c.pth"), "scan").model
    assert model.spec.matcher == {
        "name": "scan-i2t",
        "lambda_softmax": 4.0,
        "aggregation": "mean",
        "raw_norm": "none",
    }
    assert model.spec.text["name"] == "gru"
    assert not model.spec.image["normalize"]
    assert torch.allclose(model.image_encoder.fc.weight, weight, atol=1e-6)


def test_naafs_boundary_at_inference_is_the_one_of_the_checkpoint() -> None:
    matcher = import_checkpoint(file_of("naaf"), "naaf").model.matcher
    assert matcher.boundary_of("t2i") == pytest.approx(0.661)


@pytest.mark.parametrize(
    ("name", "in_file", "in_model"),
    [
        ("scan", ROWS, ROWS + 1),  # <mask> is new to SCAN: a row of zeros
        ("vse_infty", ROWS - 1, ROWS),  # VSE∞ appends it when it runs
    ],
)
def test_a_vocabulary_gives_the_model_its_words(name, in_file, in_model, tmp_path) -> None:
    vocabulary = write_vocabulary(tmp_path / "v.json", in_file)
    imported = import_checkpoint(file_of(name), FILES[name], vocabulary)
    save_pretrained(imported.model, tmp_path / "m")
    model = from_pretrained(tmp_path / "m")
    assert len(model.text) == in_model == len(model.text_encoder.embed.weight)
    assert model.text.encode("dog café zebra") == [1, 4, 5, 3, 2]
    assert model.text.vocabulary.index[MASK] == in_model - 1
    added = model.text_encoder.embed.weight[ROWS:]
    assert added.abs().sum() == 0
    fixture = load_fixture(f"{name}-checkpoint")
    assert_close(scores_of(model, fixture), fixture["out.scores"])
    assert imported.vocabulary == str(vocabulary)
    assert imported.warnings == []


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("scan", 50, "50 words, but the checkpoint's embedding has 40 rows"),
        ("scan", ROWS - 1, "39 words, but the checkpoint's embedding has 40 rows"),
        ("vse_infty", ROWS, "40 words and <mask>, but the checkpoint's embedding has 40 rows"),
    ],
)
def test_the_vocabulary_of_another_model_is_refused(name, words, message, tmp_path) -> None:
    vocabulary = write_vocabulary(tmp_path / "v.json", words)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(file_of(name), FILES[name], vocabulary)


def test_chan_brings_its_own_words() -> None:
    imported = import_checkpoint(file_of("chan"), "chan")
    assert imported.model.text.encode("w4 w38") == [1, 4, 38, 2]
    assert imported.warnings == []


def test_without_a_vocabulary_words_are_stand_ins_and_the_import_says_so() -> None:
    imported = import_checkpoint(file_of("naaf-glove"), "naaf")
    entries = imported.model.text.vocabulary.entries
    assert entries[:5] == ["<pad>", "<unk>", "<start>", "<end>", "word4"]
    assert imported.vocabulary is None
    assert "--vocab" in imported.warnings[0]


def pickled_vocabulary(module: str, protocol: int) -> bytes:
    """A Vocabulary object as a script pickled it, its class in a module that is not here."""
    kind = type("Vocabulary", (), {"__module__": module})
    home = types.ModuleType(module)
    home.Vocabulary = kind
    thing = kind()
    thing.__dict__.update(vocabulary_layout(ROWS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, module, home)
        return pickle.dumps(thing, protocol)


@pytest.mark.parametrize("module", ["__main__", "vocab"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickled_vocabulary_is_read(module, protocol, tmp_path) -> None:
    (tmp_path / "v.pkl").write_bytes(pickled_vocabulary(module, protocol))
    model = import_checkpoint(file_of("scan"), "scan", tmp_path / "v.pkl").model
    assert model.text.encode("café") == [1, 5, 2]


def test_a_vocabulary_of_python_2_is_read(tmp_path) -> None:
    with (tmp_path / "v.pkl").open("wb") as file:
        Python2Pickler(file, 2).dump(vocabulary_layout(ROWS))
    model = import_checkpoint(file_of("scan"), "scan", tmp_path / "v.pkl").model
    assert model.text.encode("café") == [1, 5, 2]


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_vocabulary_is_refused_by_name_and_not_run(protocol, tmp_path) -> None:
    mark = tmp_path / "was-run"
    layout = vocabulary_layout(ROWS) | {"hook": Touch(mark)}
    (tmp_path / "v.pkl").write_bytes(pickle.dumps(layout, protocol))
    with pytest.raises(CheckpointError, match=r"'(posix|nt)\.system'"):
        import_checkpoint(file_of("scan"), "scan", tmp_path / "v.pkl")
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        pickled_vocabulary("vocab", 2)[:200],
        b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",  # room for 4 G memo entries
        pickle.dumps([1, 2, 3]),
        pickle.dumps({"word2idx": {"<pad>": "0"}}),
        pickle.dumps({"word2idx": {"<pad>": 0, "<end>": 2}}),
    ],
)
def test_a_damaged_vocabulary_is_named(data, tmp_path) -> None:
    (tmp_path / "v.pkl").write_bytes(data)
    with pytest.raises(DataError, match=r"v\.pkl"):
        import_checkpoint(file_of("scan"), "scan", tmp_path / "v.pkl")


def run(*arguments: object):
    return CliRunner().invoke(app, ["import", *map(str, arguments)])


def test_the_command_writes_a_model_and_says_what_it_found(tmp_path) -> None:
    done = run("--from", "scan", file_of("scan"), "--out", tmp_path / "m")
    assert done.exit_code == 0, done.output
    for expected in ("scan-t2i", "301.5", "12", "placeholders", "warning"):
        assert expected in done.output
    assert from_pretrained(tmp_path / "m").spec.name == "scan-t2i"


def test_the_command_speaks_json(tmp_path) -> None:
    vocabulary = write_vocabulary(tmp_path / "v.json", ROWS)
    done = run(
        "--from", "naaf", file_of("naaf"), "-o", tmp_path / "m", "--vocab", vocabulary, "--json"
    )
    result = json.loads(done.stdout)
    assert result["model"] == "naaf"
    assert result["epoch"] == 18
    assert result["best_rsum"] == 301.5
    assert result["vocabulary"] == str(vocabulary)
    assert result["warnings"] == []


def test_the_command_replaces_a_model_only_when_told_to_and_nothing_else_ever(tmp_path) -> None:
    shutil.copy(file_of("scan"), tmp_path / "c.pth.tar")
    arguments = ["--from", "scan", tmp_path / "c.pth.tar", "--out"]
    assert run(*arguments, tmp_path / "m").exit_code == 0
    assert isinstance(run(*arguments, tmp_path / "m").exception, ConfigError)
    assert run(*arguments, tmp_path / "m", "--overwrite").exit_code == 0
    assert isinstance(run(*arguments, tmp_path, "--overwrite").exception, ConfigError)
    assert (tmp_path / "c.pth.tar").exists()


def test_a_refused_checkpoint_leaves_no_folder(tmp_path) -> None:
    path = write(Touch(tmp_path / "was-run"), tmp_path / "c.pth")
    done = run("--from", "scan", path, "--out", tmp_path / "m")
    assert isinstance(done.exception, CheckpointError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pth"]
