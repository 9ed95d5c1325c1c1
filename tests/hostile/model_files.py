"""Hostile models: saved models, checkpoints of other projects, vocabularies, runs, indexes."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterfoil.core.storage.checksums import write_sums
from tests.data.hostile import BOMBS, forged_pointer
from tests.hostile.corpus import (
    MIB,
    QUICKLY,
    Case,
    Content,
    Make,
    built,
    deep,
    device,
    fifo,
    file,
    files,
    gzip_bomb,
    loop,
    outside,
    safetensors,
    sparse,
    subfolder,
)

CASES: list[Case] = []
BASE = "base"
"""Folder beside those of the cases, with an honest model, run and index."""


def case(door: str, name: str, make: Make, phrase: str, error: str = "CheckpointError") -> None:
    CASES.append(Case(f"{door}: {name}", door, make, error, phrase))


def copied(kind: str, change: Callable[[Path], object]) -> Make:
    """A copy of the honest model, run or index, changed."""

    def make(folder: Path) -> Path:
        copy = folder / kind
        shutil.copytree(folder.parent / BASE / kind, copy, symlinks=True)
        change(copy)
        return copy

    return make


def replaced(kind: str, name: str, content: Content, sums: bool = False) -> Make:
    """A copy in which one file has another content; ``sums``: with its checksum made right."""

    def change(copy: Path) -> None:
        target = next(copy.glob(name), copy / name)
        target.unlink(missing_ok=True)
        files({target.name: content})(target.parent)
        if sums:
            write_sums(target.parent)

    return copied(kind, change)


def edited(kind: str, name: str, /, sums: bool = False, **change: Any) -> Make:
    """A copy in which a JSON file has other values; ``a__0__b`` is ``b`` in the first of ``a``."""

    def edit(copy: Path) -> None:
        target = next(copy.glob(name))
        tree = json.loads(target.read_text())
        for key, value in change.items():
            *outer, last = key.split("__")
            part = tree
            for one in outer:
                part = part[int(one) if isinstance(part, list) else one]
            part[last] = value
        target.write_text(json.dumps(tree))
        if sums:
            write_sums(target.parent)

    return copied(kind, edit)


# Saved models.


def model(
    name: str, file_name: str, content: Content, phrase: str, error: str = "CheckpointError"
) -> None:
    case("model", name, replaced("model", file_name, content, sums=True), phrase, error)


def config(name: str, phrase: str, error: str = "CheckpointError", /, **change: Any) -> None:
    case("model", name, edited("model", "config.json", sums=True, **change), phrase, error)


model("a config 100,000 deep", "config.json", deep("["), "damaged (nested too deeply)")
model("a config that is a list", "config.json", "[]", "damaged (expected a JSON object)")
model(
    "a config that is no UTF-8", "config.json", b"\xff\xfe{}", "damaged ('utf-8' codec can't decode"
)
model("a config with NaN", "config.json", "NaN", "damaged (expected a JSON object)")
model(
    "a config of 5,000 digits",
    "config.json",
    '{"format": ' + "9" * 5000 + "}",
    "damaged (Exceeds the limit (4300",
)
model("an empty config", "config.json", b"", "damaged (Expecting value: line 1")
config("another format", "written in format 99, this version", format=99)
config("a format that is a list", "written in format [[1]], this", format=[[1]])
config("an input of 2**80 numbers", "damaged ('input_dim' is", input_dim=1 << 80)
config("an input of -1 numbers", "damaged ('input_dim' is -1, which", input_dim=-1)
config("an input that is infinite", "damaged ('input_dim' is inf, which", input_dim=float("inf"))
config("an embedding of 2**40 numbers", "damaged (1 validation error for", spec__embed_size=1 << 40)
config("an ensemble of 100,000", "damaged (1 validation error for", spec__ensemble_size=100_000)
config(
    "an encoder that does not exist",
    "config.json: unknown image encoder 'os.system'",
    spec__image={"name": "os.system"},
)
config("an encoder that is a number", "damaged (1 validation error for", spec__image=5)
config(
    "an option that does not exist",
    "damaged (model.matcher.x: matcher",
    spec__matcher={"name": "cosine", "x": 1},
)
config(
    "a processor that does not exist", "unknown kind of text processor", text_processor="__import__"
)
config("pretrained parts that are numbers", "damaged ('pretrained' is [1], which", pretrained=[1])
config(
    "a million layers", "damaged (model.text.layers", spec__text={"name": "gru", "layers": 10**6}
)
model(
    "weights that are text", "model.safetensors", b"no weights", "not a readable safetensors file"
)
model("weights that are empty", "model.safetensors", b"", "not a readable safetensors file")
model(
    "weights that are a pickle",
    "model.safetensors",
    pickle.dumps({"a": 1}),
    "not a readable safetensors file",
)
model(
    "a header of 16 exabytes",
    "model.safetensors",
    safetensors({}, length=2**64 - 1),
    "not a readable safetensors file",
)
model(
    "a header of 99 MB that is cut",
    "model.safetensors",
    safetensors(b"{", length=99 * MIB),
    "not a readable safetensors file",
)
model(
    "a header 100,000 deep",
    "model.safetensors",
    safetensors(deep("[")),
    "not a readable safetensors file",
)
model(
    "a header that is no UTF-8",
    "model.safetensors",
    safetensors(b"\xff\xff"),
    "not a readable safetensors file",
)
model(
    "a header that is a list",
    "model.safetensors",
    safetensors([]),
    "not a readable safetensors file",
)
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
model(
    "tensors that overlap",
    "model.safetensors",
    safetensors({"a": TENSOR, "b": TENSOR}, bytes(8)),
    "not a readable safetensors file",
)
model(
    "a tensor beyond the file",
    "model.safetensors",
    safetensors({"a": {**TENSOR, "data_offsets": [0, 2**40]}}),
    "not a readable safetensors file",
)
model(
    "a tensor that ends before it begins",
    "model.safetensors",
    safetensors({"a": {**TENSOR, "data_offsets": [8, 0]}}, bytes(8)),
    "not a readable safetensors file",
)
model(
    "a shape of 2**62",
    "model.safetensors",
    safetensors({"a": {**TENSOR, "shape": [2**62, 4]}}, bytes(8)),
    "not a readable safetensors file",
)
model(
    "a negative shape",
    "model.safetensors",
    safetensors({"a": {**TENSOR, "shape": [-2]}}, bytes(8)),
    "not a readable safetensors file",
)
model(
    "a type that does not exist",
    "model.safetensors",
    safetensors({"a": {**TENSOR, "dtype": "O8"}}, bytes(8)),
    "not a readable safetensors file",
)
model(
    "weights of another model",
    "model.safetensors",
    safetensors({"a": TENSOR}, bytes(8)),
    "the weights do not fit the config",
)
model(
    "weights named by half a character",
    "model.safetensors",
    safetensors(b'{"\\ud800": 1}'),
    "not a readable safetensors file",
)
model("weights that are a FIFO", "model.safetensors", fifo, "not in SHA256SUMS, so it was not")
model("weights that are a device", "model.safetensors", device, "not in SHA256SUMS, so it was not")
model("weights behind a link", "model.safetensors", outside, "not a readable safetensors file")
model(
    "weights that are a folder", "model.safetensors", subfolder, "not in SHA256SUMS, so it was not"
)


def not_finite(value: float) -> Make:
    def change(copy: Path) -> None:
        from safetensors.numpy import load_file, save_file

        weights = {
            name: array.copy() for name, array in load_file(copy / "model.safetensors").items()
        }
        next(iter(weights.values())).reshape(-1)[:1] = value
        save_file(weights, copy / "model.safetensors")
        write_sums(copy)

    return copied("model", change)


case("model", "a weight that is NaN", not_finite(float("nan")), "the weight 'image_encoder.fc.bias")
case(
    "model",
    "a weight that is infinite",
    not_finite(float("inf")),
    "the weight 'image_encoder.fc.bias",
)
case(
    "model",
    "a flipped byte",
    copied("model", lambda copy: flip(copy / "model.safetensors")),
    "damaged or changed since it was",
)
case(
    "model",
    "a file that was added",
    replaced("model", "extra.py", "import os"),
    "not in SHA256SUMS, so it was not",
)
case(
    "model",
    "sums that climb",
    replaced("model", "SHA256SUMS", f"{'0' * 64}  ../../etc/passwd\n"),
    "damaged (expected lines of a sum",
)
case(
    "model",
    "sums that are noise",
    replaced("model", "SHA256SUMS", b"\xff" * 999),
    "damaged ('utf-8' codec can't decode",
)
case("model", "sums that are a FIFO", replaced("model", "SHA256SUMS", fifo), "SHA256SUMS")
case(
    "model",
    "sums without the weights",
    replaced("model", "SHA256SUMS", ""),
    "not in SHA256SUMS, so it was not",
)
case(
    "model",
    "a config that is a FIFO",
    replaced("model", "config.json", fifo),
    "neither a run nor a saved model",
)
case(
    "model",
    "a config that is a link to itself",
    replaced("model", "config.json", loop),
    "neither a run nor a saved model",
)
case("model", "an empty folder", files({}), "neither a run nor a saved model")
case("model", "a file", file("model", b"x"), "no such folder, not a pretrained")
case("model", "a folder that is a FIFO", file("model", fifo), "no such folder, not a pretrained")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def vocabulary(name: str, content: Content, phrase: str, error: str = "DataError") -> None:
    model(f"words: {name}", "vocabulary.json", content, phrase, error)


vocabulary("lists 100,000 deep", deep("["), "not a JSON vocabulary (it is nested")
vocabulary("not JSON", b"\0\1\2", "not a JSON vocabulary (Expecting")
vocabulary("a number", "5", "expected a JSON object with")
vocabulary("numbers for words", "[1, 2, 3]", "expected a JSON object with")
vocabulary("no words", "[]", "expected a JSON object with")
vocabulary("half a character", '["\\ud800"]', "expected a JSON object with")
vocabulary(
    "fewer words than rows", '["<pad>", "<start>", "<end>", "<unk>"]', "expected a JSON object with"
)

# Checkpoints of torch.save.


def archive(data: bytes, compressed: bool = False, **records: bytes) -> bytes:
    """A file of torch.save around any pickle."""
    buffer = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", how, compresslevel=QUICKLY) as made:
        made.writestr("archive/data.pkl", data)
        made.writestr("archive/version", "3\n")
        for name, content in records.items():
            made.writestr(f"archive/data/{name}", content)
    return buffer.getvalue()


def torch_file(name: str, content: Content, phrase: str, error: str = "CheckpointError") -> None:
    case("checkpoint", name, file("c.pth.tar", content), phrase, error)


class Calls:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call, self.arguments


PHRASES = {
    "shared lists": "refused: shared containers unfold",
    "shared tuples": "refused: shared containers unfold",
    "shared dictionaries": "refused: shared containers unfold",
    "a key that takes forever to hash": "refused: a dictionary key or an",
    "an item of a set that takes forever to hash": "refused: a dictionary key or an",
    "keys with one hash": "refused: a dictionary key or an",
    "small keys that collide": "refused: a dictionary or a set",
    "small keys that collide, one at a time": "refused: a dictionary or a set",
    "items of a set that collide": "refused: a dictionary or a set",
    "nearly a million marks": "refused: containers are nested",
    "deep nesting": "refused: containers are nested more",
    "a list that holds itself": "refused: containers are nested more",
    "a memo number of two billion": "damaged or cut short (0)",
    "a string of four gigabytes": "damaged or cut short (4,294,967,280",
    "bytes of nine exabytes": "damaged or cut short",
    "a byte array of nine exabytes": "damaged or cut short",
    "a string of negative length": "damaged or cut short (it ends",
    "a frame of nine exabytes": "damaged or cut short (7)",
    "an integer of many bytes": "refused: it holds an integer of",
    "an integer of many digits": "damaged or cut short (a line",
    "a byte array of a trillion bytes": "refused: it wants to call",
    "bytes of a trillion bytes": "refused: it wants to call 'bytes",
    "a range": "holds 'builtins.range'; only",
    "the same bytes encoded many times": "refused: it copies the same bytes",
    "the same set made many times": "refused: it takes more than",
    "more instructions than any file needs": "refused: it takes more than",
    "an encoding that imports a module": "refused: it wants to call",
    "a reduction of a number": "refused: it wants to call 'int",
    "a state for a list": "refused: it wants to change a list",
    "an extension": "refused: it uses the pickle",
    "an unknown instruction": "damaged or not a pickle (it holds",
    "no end": "refused: it uses the pickle",
    "nothing on the stack": "damaged or cut short (pop from",
    "a mark too few": "damaged or cut short (pop from",
}
for bomb, data in BOMBS.items():
    torch_file(bomb, built(lambda data=data: archive(b"\x80\x02" + data)), PHRASES[bomb])
torch_file(
    "a call of os.system",
    archive(pickle.dumps(Calls(os.system, "false"), 2)),
    "holds 'posix.system'; only tensors",
)
torch_file(
    "a call of eval", archive(pickle.dumps(Calls(eval, "1"), 2)), "holds 'builtins.eval'; only"
)
torch_file(
    "a call of open",
    archive(pickle.dumps(Calls(open, "x", "w"), 2)),
    "holds 'io.open'; only tensors",
)
torch_file(
    "a forged type of NumPy", archive(forged_pointer()), "refused: it holds a NumPy value of"
)
torch_file(
    "a compressed bomb",
    built(lambda: archive(b"N" * 64 * MIB + b".", compressed=True)),
    "refused: the record",
)
torch_file("nothing", b"", "not a file of torch.save")
torch_file("text", b"no checkpoint", "not a file of torch.save")
torch_file("a zip of something else", gzip_bomb(16 * MIB), "not a file of torch.save")
torch_file("a tar", b"\0" * 10240, "not a file of torch.save")
torch_file(
    "a zip cut short",
    archive(pickle.dumps({"model": []}, 2))[:-30],
    "damaged or cut short (File is not a",
)
torch_file(
    "a zip that counts wrong",
    archive(pickle.dumps({}, 2)).replace(
        b"PK\x05\x06\0\0\0\0\x02\0\x02\0", b"PK\x05\x06\0\0\0\0\xff\xff\xff\xff"
    ),
    "expected a dictionary with 'model",
)
torch_file("a list", archive(pickle.dumps([1, 2], 2)), "expected a dictionary with 'model")
torch_file(
    "a model that is a number",
    archive(pickle.dumps({"model": 5, "opt": {}}, 2)),
    "model' is not a list of state dicts",
)
torch_file(
    "options that are a number",
    archive(pickle.dumps({"model": [{}, {}], "opt": 5}, 2)),
    "opt' is a int, not options",
)
torch_file("a FIFO", fifo, "not a regular file but a FIFO)")
torch_file("a device", device, "not a regular file but a device)")
torch_file("a folder", subfolder, "is a folder, expected a file)")
torch_file("64 GB of zeros", sparse(2**36), "not a file of torch.save")
