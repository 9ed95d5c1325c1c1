"""Checkpoints and vocabularies that are forged or damaged: an error that says so, soon."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import time
import zipfile

import numpy as np
import pytest
import torch

from counterfoil.core.errors import CheckpointError, CounterfoilError, DataError
from counterfoil.models.importers import import_checkpoint, importers, read_checkpoint
from counterfoil.models.importers.uniter import _read_heads
from counterfoil.models.importers.vocabularies import entries_of, read_entries, read_tokenizer
from tests.conftest import ORACLE, thinned
from tests.data.hostile import BOMBS, doubled, forged_pointer
from tests.models.pickling import content_of, file_of, write

SOME_BOMBS = ("shared lists", "keys with one hash", "deep nesting")
"""`tests/data/test_pickles.py` has all of them in every run: one reader serves all files."""


def torch_file(path, pickled: bytes, records: dict[str, bytes] | None = None):
    """A zip file of torch.save around any pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for name, data in (records or {}).items():
            archive.writestr(f"archive/{name}", data)
    return path


def legacy_file(path, pickled: bytes):
    """A stream of before torch 1.6 around any pickle."""
    buffer = io.BytesIO()
    torch.save([], buffer, _use_new_zipfile_serialization=False)
    head = buffer.getvalue()
    path.write_bytes(head[: head.index(pickle.dumps([], 2))] + pickled)
    return path


@pytest.mark.parametrize("form", thinned([torch_file, legacy_file], torch_file))
@pytest.mark.parametrize("bomb", thinned(BOMBS, *SOME_BOMBS))
def test_a_bomb_in_a_checkpoint_ends_in_a_checkpoint_error(bomb, form, tmp_path) -> None:
    path = form(tmp_path / "c.pth", b"\x80\x02" + BOMBS[bomb])
    with pytest.raises(CheckpointError, match=r"c\.pth: "):
        read_checkpoint(path)


@pytest.mark.parametrize("bomb", thinned(BOMBS, *SOME_BOMBS))
def test_a_bomb_in_a_vocabulary_ends_in_an_error(bomb, tmp_path) -> None:
    (tmp_path / "v.pkl").write_bytes(b"\x80\x02" + BOMBS[bomb])
    with pytest.raises((CheckpointError, DataError), match=r"v\.pkl: "):
        read_entries(tmp_path / "v.pkl")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"word2idx": ' * 100_000,
        '{"word2idx": {"a": ' + "9" * 10_000 + "}}",
        '{"word2idx": {"a": 1e999}}',
        '{"word2idx": {"a": NaN}}',
        '{"word2idx": [[]]}',
        "\ud800",
    ],
    ids=["lists", "objects", "digits", "infinite", "nan", "a list", "not UTF-8"],
)
def test_a_hostile_json_vocabulary_ends_in_a_data_error(text, tmp_path) -> None:
    (tmp_path / "v.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match=r"v\.json: "):
        read_entries(tmp_path / "v.json")


def test_a_forged_numpy_type_in_a_checkpoint_or_vocabulary_is_refused(tmp_path) -> None:
    for core in ("numpy.core", "numpy._core"):
        path = torch_file(tmp_path / "c.pth", forged_pointer(core))
        with pytest.raises(CheckpointError, match="NumPy"):
            read_checkpoint(path)
        (tmp_path / "v.pkl").write_bytes(forged_pointer(core))
        with pytest.raises(CheckpointError, match=r"holds 'numpy\._core\.multiarray"):
            read_entries(tmp_path / "v.pkl")


STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("


def tensor(offset: int, size: tuple, stride: tuple, storage: bytes = STORAGE) -> bytes:
    """A pickled tensor of a storage of four numbers."""
    shape = b"".join(pickle.dumps(part, 2)[2:-1] for part in (offset, size, stride))
    return REBUILD + storage + shape + b"\x89ccollections\nOrderedDict\n)RtR"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(0, (1 << 40,), (1,)), "claims 4,398,046,511,104 bytes"),
        (tensor(0, (1 << 40, 1 << 40), (0, 0)), "claims"),
        (tensor(0, (2,), (1 << 40,)), "reaches beyond its storage"),
        (tensor(3, (2,), (1,)), "reaches beyond its storage"),
        (tensor(-1, (2,), (1,)), "shape is not made of numbers"),
        (tensor(0, (-2,), (1,)), "shape is not made of numbers"),
        (tensor(0, (2,), (-1,)), "shape is not made of numbers"),
        (tensor(0, (2, 2), (1,)), "shape is not made of numbers"),
        (tensor(0, ("a",), (1,)), "shape is not made of numbers"),
        (tensor(0, (1,) * 100, (1,) * 100), "a forged shape"),
        (tensor(0, (2,), (1,), b"K\x01"), "a tensor without a storage"),
        (tensor(0, (2,), (1,), STORAGE.replace(b"0X\x03", b"9X\x03")), "no record 'data/9'"),
        (STORAGE, "belongs to no tensor"),
        (b"K\x01Q", "something else than a storage"),
        (b"ctorch\nFloatStorage\n", "holds 'torch.FloatStorage'"),
        (b"ctorch\nFloatTensor\n\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R", "'torch.FloatTensor'"),
        (b"ctorch\nSize\n(X\x01\x00\x00\x00atR", "torch.Size"),
        (b"cargparse\nNamespace\n)\x81}K\x01K\x02sb", "names are not strings"),
        (b"cargparse\nNamespace\n)\x81K\x05b", "names are not strings"),
        (b"cargparse\nNamespace\n(K\x01tR", "damaged"),
        (tensor(0, (2,), (1,)) + b"}b", "wants to change a tensor"),
    ],
)
def test_a_forged_tensor_or_object_is_refused(value, message, tmp_path) -> None:
    records = {"data/0": np.arange(4, dtype=np.float32).tobytes()}
    honest = torch_file(tmp_path / "a.pth", b"\x80\x02" + tensor(1, (3,), (1,)) + b".", records)
    assert read_checkpoint(honest).tolist() == [1, 2, 3]
    path = torch_file(tmp_path / "c.pth", b"\x80\x02" + value + b".", records)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def test_many_tensors_of_one_storage_take_its_memory_once(tmp_path) -> None:
    size = 1 << 20
    storage = STORAGE.replace(b"K\x04tQ", b"J\x00\x00\x10\x00tQ")
    one = tensor(0, (size,), (1,), storage)
    path = torch_file(
        tmp_path / "c.pth", b"\x80\x02](" + one * 2000 + b"e.", {"data/0": bytes(4 * size)}
    )
    result = read_checkpoint(path)  # 8 GB, if each had its own
    assert len({item.data_ptr() for item in result}) == 1


class Named:
    """Pickled as an argparse.Namespace with any attributes."""

    def __init__(self, attributes: dict) -> None:
        self.attributes = attributes

    def __reduce__(self):
        import argparse

        return argparse.Namespace, (), self.attributes


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        np.ones(3),
        {"model": [], "opt": 1},
        {"model": [{"a": 1}], "opt": {}},
        {"model": torch.ones(2), "opt": {}},
        {("a", "b"): 1},
        Named({"self": 1, "__class__": "x"}),
        [],
        "text",
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_checkpoint_of_something_else_is_a_checkpoint_error(value, tmp_path) -> None:
    path = write(value, tmp_path / "c.pth")
    for family in importers:
        with pytest.raises(CheckpointError, match=r"c\.pth"):
            import_checkpoint(path, family)


def test_names_that_python_uses_itself_are_options_like_others(tmp_path) -> None:
    result = read_checkpoint(
        write(Named({"self": 1, "__class__": "x", "__dict__": 2}), tmp_path / "c.pth")
    )
    assert vars(result) == {"self": 1, "__class__": "x", "__dict__": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lambda_softmax", float("nan")),
        ("lambda_softmax", float("inf")),
        ("lambda_softmax", "9"),
        ("lambda_softmax", [[1]]),
        ("cross_attn", {"a": [1] * 10_000}),
        ("cross_attn", np.ones(3)),
        ("no_imgnorm", torch.ones(3)),
        ("agg_func", None),
    ],
)
def test_an_option_that_no_project_writes_is_a_short_checkpoint_error(
    name, value, tmp_path
) -> None:
    content = content_of("scan")
    setattr(content["opt"], name, value)
    with pytest.raises(CounterfoilError) as caught:
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")
    assert len(str(caught.value)) < 1000


def test_numbers_beside_the_weights_may_be_anything(tmp_path) -> None:
    content = content_of("scan") | {"epoch": float("nan"), "best_rsum": float("inf")}
    result = import_checkpoint(write(content, tmp_path / "c.pth"), "scan")
    assert (result.epoch, result.best_rsum) == (None, None)


def test_an_imported_weight_that_is_not_finite_is_refused_by_name(tmp_path) -> None:
    content = content_of("scan")
    content["model"][0]["fc.weight"][0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"fc\.weight \(image encoder\).* not finite"):
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")


@pytest.mark.parametrize(
    "name", thinned(["scan", "naaf", "vse_infty", "sgraf-sgr", "chan", "uniter"], "scan")
)
def test_weights_of_another_form_are_a_checkpoint_error(name, tmp_path) -> None:
    family, content = name.partition("-")[0], read_checkpoint(oracle_file(name))
    states = [content] if name == "uniter" else content["model"]
    changes = [(state, key) for state in states for key in state]
    draw = random.Random(name)
    refused = 0
    for state, key in draw.sample(changes, min(12, len(changes))):
        honest = state[key]
        for forged in (torch.tensor(1.0), torch.ones(0), torch.ones(1 << 20, 0)):
            state[key] = forged
            path = write(content, tmp_path / "c.pth")
            try:
                import_checkpoint(path, family, vocabulary_of(name, tmp_path))
            except CounterfoilError:
                refused += 1
        state[key] = honest
    assert refused > 12  # some weights are never read


@pytest.mark.parametrize("name", thinned(["scan", "vse_infty", "uniter"], "scan"))
def test_a_checkpoint_with_changed_bytes_is_read_or_a_checkpoint_error(name, tmp_path) -> None:
    """Only errors of Counterfoil may come out, whichever byte of the pickle changes."""
    source, path = oracle_file(name), tmp_path / "c.pth"
    data, draw = source.read_bytes(), random.Random(name)
    start, end = 20, 4000  # the pickle comes first in a stream of before torch 1.6
    if data.startswith(b"PK"):
        with zipfile.ZipFile(source) as archive:
            record = next(r for r in archive.infolist() if r.filename.endswith("data.pkl"))
        start, end = record.header_offset + 60, record.header_offset + record.file_size
    refused = 0
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(draw.choice([1, 1, 3])):
            changed[draw.randrange(start, end)] = draw.randrange(256)
        path.write_bytes(bytes(changed))
        try:
            import_checkpoint(path, name, vocabulary_of(name, tmp_path))
        except CounterfoilError:
            refused += 1
    assert refused > 10


def oracle_file(name: str):
    return ORACLE / "uniter-checkpoint.pt" if name == "uniter" else file_of(name)


def vocabulary_of(name: str, folder):
    """The tokenizer that UNITER's checkpoints need; others have stand-ins for their words."""
    if name != "uniter":
        return None
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    rows = len(read_checkpoint(oracle_file(name))["uniter.embeddings.word_embeddings.weight"])
    pieces = [*specials, *(f"piece{number}" for number in range(len(specials), rows))]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    return folder / "vocab.txt"


def test_a_doubling_value_among_the_options_is_refused_at_once(tmp_path) -> None:
    data = b"\x80\x02}(X\x05\x00\x00\x00model]X\x03\x00\x00\x00opt" + doubled("list", 60) + b"u."
    with pytest.raises(CheckpointError, match="unfold to more than"):
        import_checkpoint(torch_file(tmp_path / "c.pth", data), "scan")


def test_a_conjugated_tensor_is_refused_instead_of_read_without_that(tmp_path) -> None:
    value = torch.tensor([1 + 2j]).conj()
    with pytest.raises(CheckpointError, match="a tensor with metadata"):
        read_checkpoint(write({"a": value}, tmp_path / "c.pth"))
    result = read_checkpoint(write({"a": value.resolve_conj()}, tmp_path / "c.pth"))
    assert result["a"].tolist() == [1 - 2j]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_as_a_checkpoint_or_vocabulary_is_refused_and_not_waited_for(tmp_path) -> None:
    for name in ("c.pth", "v.pkl", "v.json", "vocab.txt", "c.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="not a regular file but a FIFO"):
        import_checkpoint(tmp_path / "c.pth", "scan")
    for name in ("v.pkl", "v.json"):
        with pytest.raises(DataError, match="not a regular file but a FIFO"):
            import_checkpoint(file_of("scan"), "scan", tmp_path / name)
    with pytest.raises(DataError, match="not a regular file but a FIFO"):
        read_tokenizer(tmp_path / "vocab.txt", 10)
    with pytest.raises(CheckpointError, match="not a regular file but a FIFO"):
        _read_heads(tmp_path / "c.json", 8)


def test_names_in_errors_hold_no_control_characters(tmp_path) -> None:
    data = b"\x80\x04\x8c\x05\x1b[31m\x8c\x04a\nb\x07\x93."
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(torch_file(tmp_path / "c.pth", data))
    assert str(caught.value).isprintable()
    (tmp_path / "v.pkl").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_entries(tmp_path / "v.pkl")
    assert str(caught.value).isprintable()
    content = content_of("scan")
    content["model"][0]["\x1b[31m\n"] = torch.ones(1)
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(write(content, tmp_path / "c.pth"), "scan")
    assert str(caught.value).isprintable()


def test_a_vocabulary_with_half_a_surrogate_pair_is_refused(tmp_path) -> None:
    index = {word: number for number, word in enumerate(["<pad>", "<start>", "\ud800x"])}
    (tmp_path / "v.json").write_text(json.dumps({"word2idx": index}))
    (tmp_path / "v.pkl").write_bytes(pickle.dumps({"word2idx": index}))
    for name in ("v.json", "v.pkl"):
        with pytest.raises(DataError, match="is not Unicode text") as caught:
            read_entries(tmp_path / name)
        assert str(caught.value).isprintable()


def test_word_numbers_chosen_to_collide_are_refused_at_once() -> None:
    index = {f"w{number}": number << 40 for number in range(110_000)}
    before = time.process_time()
    with pytest.raises(DataError, match="word numbers are not"):
        entries_of(index, "v")
    assert time.process_time() - before < 5


@pytest.mark.slow
def test_a_pickled_vocabulary_of_420_000_words_is_read(tmp_path) -> None:
    index = {f"word{number}": number for number in range(420_000)}
    layout = {"word2idx": index, "idx2word": dict(enumerate(index)), "idx": len(index)}
    (tmp_path / "v.pkl").write_bytes(pickle.dumps(layout, 4))
    assert len(read_entries(tmp_path / "v.pkl")) == 420_000


def test_a_vocabulary_of_too_many_instructions_is_told_to_be_saved_as_json(tmp_path) -> None:
    (tmp_path / "v.pkl").write_bytes(b"\x80\x02" + b"N0" * 1_000_000 + b"N.")
    with pytest.raises(CheckpointError, match=r"more than 1,000,000 instructions; save it as JSON"):
        read_entries(tmp_path / "v.pkl")
