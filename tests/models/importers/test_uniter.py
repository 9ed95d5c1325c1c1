"""UNITER's and TAGS' state dicts: the same scores after import, and clear words where not."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import CheckpointError, DataError
from counterfoil.models import from_pretrained, save_pretrained
from counterfoil.models.importers import import_checkpoint, read_checkpoint
from tests.conftest import ORACLE, assert_close, load_fixture
from tests.models.cross import images_of, texts_of, write_pieces, write_sizes
from tests.models.pickling import Touch, write

FILES = {"uniter": "uniter", "tags": "tags"}
ROWS = 50  # words in the embeddings of these files


@pytest.fixture
def folder(tmp_path):
    """A run of the public code: checkpoints, and what it was run with in the log folder."""
    for name in ("ckpt", "log"):
        (tmp_path / "run" / name).mkdir(parents=True)
    write_sizes(tmp_path / "run" / "log", load_fixture("uniter-checkpoint").hyper)
    for name in FILES:
        shutil.copy(ORACLE / f"{name}-checkpoint.pt", tmp_path / "run" / "ckpt" / f"{name}.pt")
    write_pieces(tmp_path, ROWS)
    return tmp_path


def bring(folder, name: str, family: str | None = None):
    return import_checkpoint(
        folder / "run" / "ckpt" / f"{name}.pt", family or FILES[name], folder / "vocab.txt"
    )


def changed(folder, name: str, change) -> None:
    """The checkpoint with its state dict changed."""
    path = folder / "run" / "ckpt" / f"{name}.pt"
    state = read_checkpoint(path)
    change(state)
    write(state, path)


@pytest.mark.parametrize("name", FILES)
def test_an_imported_model_scores_as_the_original_did(name, folder) -> None:
    imported = bring(folder, name)
    save_pretrained(imported.model, folder / "m")
    model = from_pretrained(folder / "m")
    fixture = load_fixture(f"{name}-checkpoint")
    with torch.inference_mode():
        scores = model(images_of(fixture), texts_of(fixture)).T
        assert_close(scores, fixture["out.score_matrix_sigmoid"])
        model.matcher.output = "logit"
        logits = model(images_of(fixture), texts_of(fixture)).T
    assert_close(logits, fixture["out.score_matrix"])
    assert (imported.warnings, imported.vocabulary) == ([], str(folder / "vocab.txt"))


def test_heads_are_those_of_the_file(folder) -> None:
    assert list(bring(folder, "uniter").model.matcher.heads) == ["rank", "itm"]
    stage_2 = ["rank", "itm", "mlm", "discrimination", "correction"]
    assert list(bring(folder, "tags").model.matcher.heads) == stage_2
    assert list(bring(folder, "tags", "uniter").model.matcher.heads) == stage_2
    stage_2_only = ("disc_output.", "correction_output.")
    changed(
        folder,
        "tags",
        lambda state: [state.pop(k) for k in list(state) if k.startswith(stage_2_only)],
    )
    assert list(bring(folder, "tags").model.matcher.heads) == ["rank", "itm", "mlm"]


def test_captions_are_cut_by_the_cased_tokenizer(folder) -> None:
    text = bring(folder, "uniter").model.text
    assert text.pieces("a Dog doggy.") == ["[CLS]", "a", "Dog", "dog", "##gy", ".", "[SEP]"]
    assert text.tokenizer.mask_token_id == 4
    assert len(text.encode("dog " * 40)) == 24  # no more than there are positions


def test_a_tokenizer_folder_does_as_well(folder) -> None:
    bring(folder, "uniter").model.text.save(folder / "saved")
    path = folder / "run" / "ckpt" / "uniter.pt"
    again = import_checkpoint(path, "uniter", folder / "saved" / "tokenizer").model
    assert again.text.pieces("Dog.") == ["[CLS]", "Dog", ".", "[SEP]"]


def test_a_pretrained_file_ranks_by_the_answer_yes(folder) -> None:
    def pretrained(state) -> None:
        del state["rank_output.weight"], state["rank_output.bias"]
        state["feat_regress.net.0.weight"] = torch.ones(3)
        state["region_classifier.net.0.weight"] = torch.ones(3)

    changed(folder, "uniter", pretrained)
    heads = bring(folder, "uniter").model.matcher.heads
    assert torch.equal(heads["rank"].weight, heads["itm"].weight[1:])
    fixture = load_fixture("uniter-checkpoint")
    with torch.inference_mode():
        scores = bring(folder, "uniter").model(images_of(fixture), texts_of(fixture)).T
    assert_close(scores, fixture["out.score_matrix_sigmoid"])


def test_heads_of_attention_come_from_beside_the_file_or_not_at_all(folder) -> None:
    assert bring(folder, "uniter").model.spec.matcher["heads"] == 4
    write_sizes(folder / "run" / "ckpt", {"num_attention_heads": 8})
    assert bring(folder, "uniter").model.spec.matcher["heads"] == 8
    write_sizes(folder / "run" / "ckpt", {"num_attention_heads": 5})
    with pytest.raises(CheckpointError, match=r"model\.json: num_attention_heads=5 does not fit"):
        bring(folder, "uniter")
    (folder / "run" / "ckpt" / "model.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"not a readable model\.json"):
        bring(folder, "uniter")
    (folder / "run" / "ckpt" / "model.json").unlink()
    (folder / "run" / "log" / "model.json").unlink()
    with pytest.raises(CheckpointError, match=r"attention heads for width 32.*model\.json"):
        bring(folder, "uniter")


def test_without_a_tokenizer_it_is_refused_and_says_which(folder) -> None:
    path = folder / "run" / "ckpt" / "uniter.pt"
    with pytest.raises(CheckpointError, match=r"words are those of bert-base-cased.*--vocab"):
        import_checkpoint(path, "uniter")
    with pytest.raises(DataError, match="no such tokenizer"):
        import_checkpoint(path, "uniter", folder / "nothing")
    write_pieces(folder, ROWS + 3)
    with pytest.raises(CheckpointError, match="53 pieces, but the checkpoint's embedding has 50"):
        bring(folder, "uniter")
    (folder / "vocab.txt").write_text("dog\ncat\n")
    with pytest.raises(DataError, match=r"not a vocab\.txt of BERT"):
        bring(folder, "uniter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("uniter.encoder.layer.1.output.dense.bias"),
            r"missing: uniter\.encoder\.layer\.1\.output\.dense\.bias",
        ),
        (
            lambda state: state.pop("uniter.encoder.layer.0.attention.self.key.weight"),
            r"missing: .*layer\.0\.attention\.self\.qkv\.weight.*layer\.0.*query\.weight",
        ),
        (lambda state: state.update({"new.weight": torch.ones(1)}), r"unknown: new\.weight"),
        (
            lambda state: state.pop("uniter.img_embeddings.pos_linear.weight"),
            r"missing: uniter\.img_embeddings\.pos_linear\.weight",
        ),
        (
            lambda state: state.pop("uniter.embeddings.token_type_embeddings.weight"),
            r"missing: .*token_type_embeddings\.weight\[0\]",
        ),
        (
            lambda state: state.update(
                {"cls.predictions.decoder.weight": state["cls.predictions.decoder.weight"] + 1}
            ),
            "differs from the word embeddings",
        ),
        (
            lambda state: state.pop("uniter.embeddings.word_embeddings.weight"),
            r"no usable weight 'uniter\.embeddings\.word_embeddings",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named_as_the_file_names_them(change, message, folder) -> None:
    changed(folder, "tags", change)
    with pytest.raises(CheckpointError, match=message):
        bring(folder, "tags")


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("uniter", "tags", r"not a checkpoint of TAGS \(it has no cls\..*UNITER: --from uniter"),
        ("uniter", "scan", r"1 instead of 2.*--from uniter"),
        ("tags", "naaf", r"1 instead of 2.*--from tags"),
    ],
)
def test_the_wrong_family_is_named_and_the_right_one_offered(name, family, message, folder) -> None:
    with pytest.raises(CheckpointError, match=message):
        bring(folder, name, family)


def test_nothing_in_a_hostile_file_is_run(folder) -> None:
    mark = folder / "was-run"
    changed(folder, "uniter", lambda state: state.update({"hook": Touch(mark)}))
    with pytest.raises(CheckpointError, match="nothing was run"):
        bring(folder, "uniter")
    assert not mark.exists()


def test_the_command_writes_a_model_that_can_be_used(folder) -> None:
    arguments = ["--from", "tags", str(folder / "run" / "ckpt" / "tags.pt")]
    arguments += ["--vocab", str(folder / "vocab.txt"), "--out", str(folder / "m"), "--json"]
    done = CliRunner().invoke(app, ["import", *arguments])
    result = json.loads(done.stdout)
    assert (result["family"], result["words"], result["input_dim"]) == ("tags", ROWS, 20)
    assert from_pretrained(folder / "m").spec.matcher["extras"][-1] == "correction"
