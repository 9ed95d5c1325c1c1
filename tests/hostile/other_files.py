"""Hostile recipes, registries, downloads, reports, foils, judgements, benchmarks, word vectors."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import yaml

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
    npy,
    sparse,
)

CASES: list[Case] = []


def case(door: str, name: str, make: Make, phrase: str, error: str = "DataError") -> None:
    CASES.append(Case(f"{door}: {name}", door, make, error, phrase))


def recipe(name: str, content: Content, phrase: str, error: str = "ConfigError") -> None:
    case("recipe", name, file("r.yaml", content), phrase, error)


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)
recipe("a billion laughs", LAUGHS, "more than 10,000 values, aliases")
recipe("lists 10,000 deep", deep("[", 10_000), "nested deeper than 32 levels")
recipe("maps 10,000 deep", deep("{a: ", 10_000), "nested deeper than 32 levels")
recipe(
    "indents 2,000 deep",
    "".join(" " * n + "a:\n" for n in range(600)),
    "nested deeper than 32 levels",
)
recipe("an anchor in itself", "a: &a [*a]\n", "an alias refers to the value that")
recipe("a merge of itself", "a: &a\n  <<: *a\n", "an alias refers to the value that")
recipe("a call", "a: !!python/object/apply:os.system ['false']\n", "line 1: could not determine a")
recipe("a Python name", "a: !!python/name:os.system\n", "line 1: could not determine a")
recipe("a tag that is unknown", "a: !x 1\n", "line 1: could not determine a")
recipe("a timestamp that is none", "a: !!timestamp 9999-99-99\n", "line 1: could not determine a")
recipe(
    "a number of 200,000 digits",
    "seed: " + "9" * 200_000 + "\n",
    "line 1: a number of more than 100",
)
recipe("a number in base 60", "seed: " + "1:" * 5000 + "0\n", "line 1: a number of more than 100")
recipe(
    "an infinite rate",
    "train:\n  optimizer:\n    lr: .inf\n",
    "train.optimizer.lr: Input should be",
)
recipe(
    "a rate that is NaN",
    "train:\n  optimizer:\n    lr: .nan\n",
    "train.optimizer.lr: Input should be",
)
recipe("keys given twice", "seed: 1\nseed: 2\n", "line 2: the key 'seed' is given")
recipe("keys that are lists", "? [a]\n: 1\n", "line 1: a key is a name, not a")
recipe("keys that are unknown", "sed: 1\n", "unknown key 'sed'; did you mean")
recipe("epochs without end", f"train:\n  epochs: {10**30}\n", "train.epochs: Input should be less")
recipe("a batch of -1", "train:\n  batch_size: -1\n", "train.batch_size: Input should be")
recipe("a seed that is a text", "seed: one\n", "seed: Input should be a valid")
recipe("two documents", "seed: 1\n---\nseed: 2\n", "line 2: but found another document")
recipe("a list", "- a\n", "expected a mapping of keys, got list")
recipe("tabs", "seed:\t1\n\tx: 2\n", "line 1: found character '\\t' that")
recipe("NUL bytes", b"seed: 1\0\n", "special characters are not allowed")
recipe("no UTF-8", b"seed: \xff\n", "'utf-8' codec can't decode byte")
recipe("one megabyte", b"# " + b"x" * MIB, "too large: 1 MiB, at most 256 KiB")
recipe("one that extends itself", "extends: r.yaml\n", "extends itself, directly or through")
recipe("one that extends a device", "extends: /dev/zero\n", "/dev/zero: not a readable recipe")
recipe(
    "one that extends what is not there",
    "extends: ../../x.yaml\n",
    "no such recipe (counterfoil recipes",
)
recipe("a FIFO", fifo, "not a regular file but a FIFO")
recipe("a device", device, "not a regular file but a device")
recipe("a gzip bomb", gzip_bomb(16 * MIB), "'utf-8' codec can't decode byte")


# Registries and downloads of the zoo.


def entry(**change: Any) -> dict[str, Any]:
    one = {"sha256": "0" * 64, "size": 4}
    names = ("config.json", "model.safetensors", "SHA256SUMS", "README.md")
    result = {"name": "R@1", "value": 1.0, "command": "x"}
    return {
        "summary": "x", "trained_on": "x", "command": "x", "results": [result], "license": "MIT",
        "terms": "x", "url": "URL", "files": dict.fromkeys(names, one), **change,
    }  # fmt: skip


def registry(name: str, phrase: str, error: str = "CheckpointError", **change: Any) -> None:
    text = yaml.safe_dump({"small": entry(**change)}, sort_keys=False)
    case("download", name, file("registry.yaml", text), phrase, error)


ONE = {"sha256": "0" * 64, "size": 4}
registry("a file of another content", "refused and deleted")
registry(
    "a file that climbs",
    "small.files: Value error, not a",
    files={**entry()["files"], "../../x": ONE},
)
registry(
    "an absolute file", "small.files: Value error, not a", files={**entry()["files"], "/etc/x": ONE}
)
registry(
    "a program among the files",
    "small.files: Value error, not a",
    files={**entry()["files"], "a.py": ONE},
)
registry(
    "a file of an exabyte",
    "small.files.README.md.size: Input",
    files={**entry()["files"], "README.md": {**ONE, "size": 2**60}},
)
registry(
    "a file of -1 bytes",
    "small.files.README.md.size: Input",
    files={**entry()["files"], "README.md": {**ONE, "size": -1}},
)
registry(
    "a checksum that is none",
    "small.files.README.md.sha256",
    files={**entry()["files"], "README.md": {**ONE, "sha256": "x"}},
)
registry(
    "an address of a file", "small: could not be downloaded", "DownloadError", url="file:///etc"
)
registry(
    "an address without encryption",
    "small: could not be downloaded",
    "DownloadError",
    url="http://192.0.2.1/x",
)
registry(
    "an address of FTP", "small: could not be downloaded", "DownloadError", url="ftp://127.0.0.1/x"
)
registry(
    "a server that sends without end",
    "small: could not be downloaded",
    "DownloadError",
    url="URL/endless",
)
registry(
    "a server that sends less", "small: could not be downloaded", "DownloadError", url="URL/short"
)
registry(
    "a server that redirects to a file",
    "small: could not be downloaded",
    "DownloadError",
    url="URL/to-file",
)
registry(
    "a server that redirects in a circle",
    "small: could not be downloaded",
    "DownloadError",
    url="URL/circle",
)
registry("a server that fails", "small: could not be downloaded", "DownloadError", url="URL/500")
registry(
    "a server that speaks no HTTP", "could not be downloaded", "DownloadError", url="URL/noise"
)
registry("no results", "small.results: List should have at", results=[])
registry("a key that is unknown", "small.execute: Extra inputs are not", execute="x")
case(
    "download",
    "a registry of a billion laughs",
    file("registry.yaml", LAUGHS),
    "not a registry (more than 10,000",
    "CheckpointError",
)
case(
    "download",
    "a registry that calls",
    file("registry.yaml", "a: !!python/object/apply:os.system ['x']\n"),
    "not a registry (line 1: could not",
    "CheckpointError",
)

# Reports of an audit, decisions on them.


def findings(name: str, content: Content, phrase: str, error: str = "DataError") -> None:
    case("audit", name, files({"findings.jsonl": content}), phrase, error)


findings("not JSON", "{\n", "line 1: not a Finding: Invalid")
findings("lists 100,000 deep", deep("["), "line 1: not a Finding: Invalid")
findings("a number", "5\n", "line 1: not a Finding: Input should")
findings("fields that are missing", "{}\n", "line 1: not a Finding: Field")
findings("no UTF-8", b"\xff\n", "line 1: not a Finding: Invalid")
findings("a line of 20 MB", b'{"a": "' + b"x" * 20 * MIB, "a line of more than 16 MiB: not a")
findings("a FIFO", fifo, "has no findings.jsonl; write one")
findings("8 GB of zeros", sparse(8 * 2**30), "too large: 8 GiB, at most 4 GiB of")
case("audit", "nothing", files({}), "has no findings.jsonl; write one")
case(
    "merge",
    "decisions that are noise",
    files({"decisions.jsonl": b"\xff\n" * 9}),
    "none of its lines is a decision",
)
case(
    "merge",
    "decisions 100,000 deep",
    files({"decisions.jsonl": deep("[")}),
    "none of its lines is a decision",
)
case("merge", "decisions that are a FIFO", files({"decisions.jsonl": fifo}), "not a regular file")


def lines(door: str, rows: dict[str, tuple[Content, str]]) -> None:
    for name, (content, phrase) in rows.items():
        case(door, name, file("a.jsonl", content), phrase)


FOIL = {"image": "a", "caption": 0, "foil": "a cat"}
lines("foils", {
    "not JSON": ("{\n", "not JSON (Expecting property name"),
    "lists 100,000 deep": (deep("["), "not JSON (maximum recursion"),
    "a number": ("5\n", "expected an object, got int"),
    "a caption of -1": (json.dumps({**FOIL, "caption": -1}), "caption' counts from 0, got -1"),
    "an empty foil": (json.dumps({**FOIL, "foil": " "}), "the foil is empty"),
    "no UTF-8": (b"\xff\n", "not JSON ('utf-8' codec can't"),
    "half a character": ('{"image": "a", "caption": 0, "foil": "\\ud800"}', "half a character"),
    "a FIFO": (fifo, "not a regular file but a FIFO)"),
    "a line of 20 MB": (b'{"image": "' + b"x" * 20 * MIB, "a line of more than 16 MiB: not a"),
})  # fmt: skip
lines("judgements", {
    "not JSON": ("{\n", "1 columns; expected"),
    "lists 100,000 deep": (deep("["), "1 columns; expected"),
    "a number": ("5\n", "1 columns; expected"),
    "no rows": ("", "no judgements in this file"),
    "no UTF-8": (b"\xff\n", "not a text file"),
    "a FIFO": (fifo, "not a regular file but a FIFO"),
    "9 GB of zeros": (sparse(9 * 2**30), "too large: 9 GiB"),
})  # fmt: skip
BENCHMARKS: dict[str, tuple[Content, str]] = {
    "not JSON": ("{", "line 1, column 2: not JSON"),
    "objects 100,000 deep": (deep('{"a":'), "not readable as JSON (maximum"),
    "a number": ("5", "expected an object or a list of"),
    "no UTF-8": (b"\xff", "not UTF-8 text (byte 0); save it as"),
    "keys given twice": (
        '{"1": {"caption": "x", "caption": "y"}}',
        "item '1', field 'caption': appears",
    ),
    "100,000 keys, one of them twice": (
        "[{" + ",".join(f'"{n}": 1' for n in range(100_000)) + ', "99999": 2}]',
        "item '0', field '99999': appears",
    ),
    "a FIFO": (fifo, "not a regular file but a FIFO)"),
    "records that are numbers": ('{"1": 5}', "item '1': expected an object, got"),
    "9 GB of zeros": (sparse(9 * 2**30), "too large: 9 GiB, at most 1 GiB of"),
}
for name, (content, phrase) in BENCHMARKS.items():
    case("benchmark", name, file("add_obj.json", content), phrase)
case(
    "benchmark",
    "100,000 columns, one of them twice",
    file("add_obj.csv", ",".join(map(str, range(100_000))) + ",99999\n"),
    "the column '99999' appears twice",
)

BOMB = "unpacks to more than 100 times its"
for name in ("add_obj.json.gz", "add_obj.jsonl.gz", "add_obj.csv.gz"):
    case("benchmark", f"{name}, a gzip bomb", file(name, gzip_bomb()), BOMB)
case("captions", "a gzip bomb", file("captions.txt.gz", gzip_bomb()), BOMB)
case(
    "captions",
    "a line of 20 MB",
    file("captions.txt", b"a dog\n" * 100 + b"dog " * 5 * MIB),
    "line 101 has more than 4,000",
)
case("captions", "9 GB of zeros", file("captions.txt", sparse(9 * 2**30)), "too large: 9 GiB")

# Vocabularies of other projects, given to an import.


def word_file(
    name: str, content: Content, phrase: str, error: str = "DataError", suffix: str = ".json"
) -> None:
    case("vocabulary", name, file(f"v{suffix}", content), phrase, error)


word_file("lists 200,000 deep", deep("[", 200_000), "not a JSON vocabulary (it is nested")
word_file("objects 100,000 deep", deep('{"word2idx": '), "not a JSON vocabulary (it is nested")
word_file(
    "a number of 10,000 digits",
    '{"word2idx": {"a": ' + "9" * 10_000 + "}}",
    "not a JSON vocabulary (Exceeds the",
)
word_file("an infinite number", '{"word2idx": {"a": 1e999}}', "expected a JSON object with")
word_file("NaN", '{"word2idx": {"a": NaN}}', "expected a JSON object with")
word_file("a list", '{"word2idx": [[]]}', "expected a JSON object with")
word_file("half a character", b"\xed\xa0\x80", "not a JSON vocabulary ('utf-8")
word_file("a FIFO", fifo, "not a regular file but a FIFO)")
word_file("a device", device, "not a regular file but a device)")
word_file(
    "a pickle that calls",
    b"cos\nsystem\n(S'false'\ntR.",
    "holds 'os.system'; only an object",
    "CheckpointError",
    suffix=".pkl",
)
word_file(
    "a pickle that points into memory",
    forged_pointer(),
    "only an object of a class",
    "CheckpointError",
    suffix=".pkl",
)
PICKLED_WORDS = {
    "shared lists": ("CheckpointError", "refused: shared containers unfold"),
    "small keys that collide": ("CheckpointError", "refused: a dictionary or a set"),
    "a memo number of two billion": ("DataError", "not a readable pickle (damaged or"),
}
for bomb, (error, phrase) in PICKLED_WORDS.items():
    word_file(f"a pickle of {bomb}", b"\x80\x02" + BOMBS[bomb], phrase, error, suffix=".pkl")

# Word vectors.


def npz(member: bytes, compressed: bool = True) -> bytes:
    buffer = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", how, compresslevel=QUICKLY) as archive:
        archive.writestr("vectors.npy", member)
        archive.writestr("words.npy", npy("(1,)", "'<U3'", b"d\0\0\0o\0\0\0g\0\0\0"))
    return buffer.getvalue()


def vectors(
    name: str, content: Content, phrase: str, error: str = "DataError", suffix: str = ".txt"
) -> None:
    case("vectors", name, file(f"v{suffix}", content), phrase, error)


vectors("numbers that are none", "dog x y z\n", "none of the 20 words has a vector")
vectors("lines of different lengths", "dog 1 2\ncat 1\n", "none of the 20 words has a vector")
vectors("numbers that are not finite", "dog nan inf\n", "none of the 20 words has a vector")
vectors("a line of 2 GB", sparse(2**31), "a line of more than 1 MiB: not a")
vectors("16 GB", sparse(2**34), "a line of more than 1 MiB: not a")
vectors("a FIFO", fifo, "not a regular file but a FIFO)")
vectors("no UTF-8", b"\xff\xff 1 2\n", "none of the 20 words has a vector")
vectors(
    "a zip without arrays",
    npz(b"x"),
    "vectors: not a readable .npy file",
    "ArrayError",
    suffix=".npz",
)
vectors(
    "an array of objects",
    npz(npy("(1, 2)", "'|O'")),
    "vectors: holds Python objects",
    "ArrayError",
    suffix=".npz",
)
vectors(
    "an array of 4 exabytes", npz(npy(f"({2**60},)")), "expected arrays 'words' and", suffix=".npz"
)
vectors(
    "a bomb of 4 GB",
    built(lambda: npz(npy(f"({2**20}, {2**10})", data=bytes(64 * MIB)))),
    "expected arrays 'words' and",
    suffix=".npz",
)


def clip(weights: Content, name: str = "pytorch_model.bin", **change: Any) -> Make:
    """A folder as transformers writes it."""
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 1}
    config = {
        "model_type": "clip", "projection_dim": 8, "architectures": ["CLIPModel"],
        "text_config": {**tower, "vocab_size": 9}, "vision_config": {**tower, "image_size": 32},
        **change,
    }  # fmt: skip
    return files({"config.json": config, name: weights})


CALL = b"cos\nsystem\n(S'false'\ntR."
case(
    "model",
    "CLIP: weights that call",
    clip(CALL),
    "could run code (nothing was run)",
    "CheckpointError",
)
case(
    "model",
    "CLIP: code of its own",
    clip(b"", auto_map={"AutoModel": "evil.Evil"}, model_type="evil"),
    "The checkpoint you are trying to",
    "CheckpointError",
)
case(
    "model",
    "CLIP: weights that are noise",
    clip(b"\xff" * 99, "model.safetensors"),
    "header too large",
    "CheckpointError",
)
case(
    "model",
    "CLIP: a width of 2**40",
    clip(b"", projection_dim=2**40),
    "less than or equal to 65536",
    "CheckpointError",
)
