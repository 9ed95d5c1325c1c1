"""Models on the hub: pushed and loaded through `huggingface_hub`, against a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from counterfoil.core import zoo
from counterfoil.core.errors import MissingExtraError
from counterfoil.core.hub import HUB_ADDRESS, hub_library
from counterfoil.core.storage.checksums import write_sums
from counterfoil.models import from_pretrained
from counterfoil.models.store import save_pretrained
from tests.conftest import thinned
from tests.core.hub_server import Hub, hub_server

FETCH = """
import json, sys
from pathlib import Path
from counterfoil.core import zoo
from counterfoil.core.errors import CounterfoilError
from counterfoil.core.progress import Silent
class Notes(Silent):
    def say(self, text): notes.append(text)
notes, answers = [], []
for source in sys.argv[2:]:
    try:
        answers.append(str(zoo.resolve(source, cache=sys.argv[1], progress=Notes())))
    except CounterfoilError as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps([answers, notes, "torch" in sys.modules]))
"""
PUSH = """
import sys
import counterfoil as cf
from counterfoil.core.errors import CheckpointError
try:
    corrector = cf.load("scenes-corrector")
    print(cf.push_to_hub(corrector, "me/corrector", half=True))
    print(cf.push_to_hub(corrector, "me/corrector", half=True, card="# My card"))
    one, two = cf.load("scenes-corrector"), cf.load("hf://me/corrector", cache_dir=sys.argv[1])
    print(all((one.state_dict()[key] == value).all() for key, value in two.state_dict().items()))
    print(one.correction_rule == two.correction_rule and one.yardstick == two.yardstick)
except CheckpointError as error:
    print(error)
"""

COMMANDS = """
import shlex, sys
from counterfoil.cli import app
for words in sys.argv[2:]:
    app(shlex.split(words), standalone_mode=False)
"""
LOAD = """
import os, sys
import counterfoil as cf
from counterfoil.core import zoo
os.environ["COUNTERFOIL_CACHE"] = sys.argv[1]
cf.load("hf://me/m")
cf.load_pairs("scenes", images=[2, 2, 2])
"""
PUSH_FOLDERS = """
import sys
import counterfoil as cf
from counterfoil.core.errors import CheckpointError
for folder, name in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        print(cf.push_to_hub(folder, name))
    except CheckpointError as error:
        print(error)
"""

FORKS = """
import importlib, json, os, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    code, words, home, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ["HOME"] = home
        sys.argv[1:] = words
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        try:
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(os.waitpid(child, 0)[1], flush=True)
"""
HUB_LIBRARY = ("counterfoil.core.zoo", "huggingface_hub.file_download", "huggingface_hub.hf_api")
WITH_TORCH = (*HUB_LIBRARY, "counterfoil.cli", "counterfoil.api", "counterfoil.training.run")


class Programs:
    """Runs programs whose `huggingface_hub` uses a hub of this machine.

    Each is a fork of a process that has imported the library for the address of that hub.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parents: dict[tuple[str, ...], subprocess.Popen[str]] = {}

    def run(self, hub: Hub, folder: Path, code: str, *words: str, imported=WITH_TORCH) -> str:
        """What the program prints."""
        key = (hub.url, *imported)
        if key not in self.parents:
            self.parents[key] = self._start(hub, imported)
        parent = self.parents[key]
        outputs = [folder / "stdout", folder / "stderr"]
        arguments = [str(folder / "cache"), *words]
        order = [code, arguments, str(folder / "home"), list(map(str, outputs))]
        assert parent.stdin is not None
        assert parent.stdout is not None
        print(json.dumps(order), file=parent.stdin, flush=True)
        status = parent.stdout.readline()
        assert status == "0\n", outputs[1].read_text()
        return outputs[0].read_text()

    def _start(self, hub: Hub, imported: tuple[str, ...]) -> subprocess.Popen[str]:
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(self.folder / "hf"),
            "HF_TOKEN": "hf_of_a_test",
            "HF_HUB_DISABLE_XET": "1",  # files by HTTP and Git LFS
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-c", FORKS, *imported],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        for parent in self.parents.values():
            parent.communicate(timeout=60)  # it ends with its input


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Iterator[Programs]:
    opened = Programs(tmp_path_factory.mktemp("programs"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server() as started:
        yield started


@pytest.fixture
def hub(server) -> Hub:
    """An empty hub; its address is the same in all tests, as the library reads it once."""
    vars(server).update(vars(Hub(url=server.url)))
    return server


@pytest.fixture
def python(programs):
    return programs.run


@pytest.fixture
def fetch(programs):
    """Answers and notes of a program that resolves the names of models."""

    def resolve(hub: Hub, folder: Path, *sources: str) -> tuple[list[str], list[str]]:
        printed = programs.run(hub, folder, FETCH, *sources, imported=HUB_LIBRARY)
        answers, notes, torch_is_loaded = json.loads(printed)
        assert not torch_is_loaded
        return answers, notes

    return resolve


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def model() -> dict[str, bytes]:
    return files_of(zoo.FOLDER / "scenes-corrector")


def test_a_saved_model_is_downloaded_once_and_again_after_a_new_commit(
    fetch, hub, model, tmp_path
) -> None:
    first = hub.commit("me/m", {**model, ".gitattributes": b"x", "pytorch_model.bin": b"pickled"})
    (folder,), _ = fetch(hub, tmp_path, "hf://me/m")
    assert sorted(hub.downloaded()) == sorted(model)
    assert {name: (Path(folder) / name).read_bytes() for name in model} == model
    hub.requests.clear()
    second = hub.commit("me/m", {})
    (same, pinned, new), _ = fetch(
        hub, tmp_path, f"hf://me/m@{first}", "hf:/me/m", "hf://me/m@main"
    )
    assert folder == same
    assert pinned == new == folder.replace(first, second)
    assert len(hub.downloaded()) == len(model)


def test_a_connection_that_breaks_off_is_opened_again(fetch, hub, model, tmp_path) -> None:
    hub.commit("me/m", model)
    hub.cuts = [10**9] * 3 + [200_000]  # of the weights, which come after three smaller files
    (folder,), _ = fetch(hub, tmp_path, "hf://me/m")
    assert hub.downloaded().count("model.safetensors") == 2
    assert files_of(Path(folder)) == model


def test_a_file_that_differs_from_its_checksum_is_refused_named_and_deleted(
    fetch, hub, model, tmp_path
) -> None:
    weights = model["model.safetensors"]
    hub.commit("me/m", {**model, "model.safetensors": weights[:-1] + bytes([weights[-1] ^ 1])})
    (answer,), _ = fetch(hub, tmp_path, "hf://me/m")
    assert "hf://me/m: refused and deleted" in answer
    assert "model.safetensors: damaged or changed" in answer
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("name", thinned(["model.pt", "a/b/c.json", "tokenizer.py"], "model.pt"))
def test_files_that_no_saved_model_has_are_never_fetched(fetch, hub, model, tmp_path, name) -> None:
    (tmp_path / "m" / name).parent.mkdir(parents=True)
    (tmp_path / "m" / name).write_bytes(b"code")
    write_sums(tmp_path / "m")
    sums = model["SHA256SUMS"] + (tmp_path / "m" / "SHA256SUMS").read_bytes()
    hub.commit("me/m", {**model, "SHA256SUMS": sums, name: b"code"})
    (answer,), _ = fetch(hub, tmp_path, "hf://me/m")
    assert f"lists '{name}', which no saved model consists of" in answer
    assert hub.downloaded() == ["SHA256SUMS"]


def test_what_is_no_saved_model_or_unknown_is_refused_with_advice(
    fetch, hub, model, tmp_path
) -> None:
    hub.commit("me/clip", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.commit("me/part", {"SHA256SUMS": model["SHA256SUMS"]})
    sources = ("hf://me/clip", "hf://me/part", "hf://me/none", "hf://me/clip@v2")
    (clip, part, none, revision), _ = fetch(hub, tmp_path, *sources)
    assert "not a saved model of Counterfoil (no SHA256SUMS there)" in clip
    assert "not a saved model of Counterfoil (no README.md there)" in part
    assert "hf://me/none: refused by the hub" in none
    assert "hf://me/clip@v2: refused by the hub" in revision
    assert "hf auth login" in none


def test_without_a_network_the_last_copy_is_used_or_the_error_says_what_to_do(
    fetch, model, tmp_path
) -> None:
    with hub_server() as hub:
        hub.commit("me/m", model)
        (folder,), _ = fetch(hub, tmp_path, "hf://me/m")
    (again, other), notes = fetch(hub, tmp_path, "hf://me/m", "hf://me/other")
    assert again == folder
    assert "the hub cannot be reached; using the copy" in notes[0]
    assert "hf://me/other: the hub cannot be reached" in other
    assert "run it again later with a network connection, or copy the model's folder" in other


@pytest.mark.parametrize("status", thinned([408, 429, 500, 502, 503, 504], 429, 503))
def test_an_outage_of_the_hub_is_like_no_network(fetch, hub, model, tmp_path, status) -> None:
    hub.commit("me/m", model)
    (folder,), _ = fetch(hub, tmp_path, "hf://me/m")
    hub.outage = status
    (again, other), notes = fetch(hub, tmp_path, "hf://me/m", "hf://me/other")
    assert again == folder
    assert "the hub cannot be reached; using the copy" in notes[0]
    assert "hf://me/other: the hub cannot be reached" in other
    assert str(status) in other


def test_an_outage_during_a_download_leads_to_the_last_copy(fetch, hub, model, tmp_path) -> None:
    hub.commit("me/m", model)
    (folder,), _ = fetch(hub, tmp_path, "hf://me/m")
    new = hub.commit("me/m", {})
    hub.outage, hub.outage_of = 501, "/resolve/"  # a status that is not tried again for minutes
    (again,), notes = fetch(hub, tmp_path, "hf://me/m")
    assert again == folder
    assert "using the copy" in notes[-1]
    hub.outage = 0
    (later,), _ = fetch(hub, tmp_path, "hf://me/m")
    assert later == folder.replace(Path(folder).name, new)


@pytest.mark.parametrize("status", thinned([401, 403, 404], 404))
def test_a_model_that_the_hub_no_longer_gives_is_refused_despite_a_copy(
    fetch, hub, model, tmp_path, status
) -> None:
    hub.commit("me/m", model)
    fetch(hub, tmp_path, "hf://me/m")
    hub.outage = status
    (answer,), _ = fetch(hub, tmp_path, "hf://me/m")
    assert "hf://me/m: refused by the hub" in answer


def test_a_pushed_model_loads_as_it_was_with_a_card_that_can_be_edited(
    python, hub, tmp_path
) -> None:
    first, second, same, measured = python(hub, tmp_path, PUSH).splitlines()
    assert first != second
    assert f"{hub.url}/me/corrector/commit/" in first
    assert (same, measured) == ("True", "True")
    cards = [files["README.md"].decode() for _, files in hub.models["me/corrector"]]
    assert 'cf.load("hf://me/corrector")' in cards[0]
    assert cards[1] == "# My card"
    assert "README.md" not in hub.downloaded()
    assert any(one.startswith("PUT /lfs/") for one in hub.requests)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A saved model without a card."""
    save_pretrained(from_pretrained("scenes-corrector"), tmp_path / "saved", half=True)
    return tmp_path / "saved"


def cards_of(hub, name: str) -> list[str]:
    """The card in each commit of a model, the latest last."""
    return [files["README.md"].decode() for _, files in hub.models[name]]


def test_the_card_of_the_folder_is_pushed_and_one_on_the_hub_stays(
    python, hub, saved, tmp_path
) -> None:
    shutil.copytree(saved, tmp_path / "run" / "best")
    (tmp_path / "run" / "README.md").write_text("# Card of the run")
    (tmp_path / "own.md").write_text("# Another card")
    python(hub, tmp_path, COMMANDS, f"push {tmp_path}/run me/run")
    assert cards_of(hub, "me/run") == ["# Card of the run"]
    hub.commit("me/run", {"README.md": b"# Edited on the hub"})
    again = f"push {tmp_path}/run me/run"
    python(hub, tmp_path, COMMANDS, again, f"{again} --card {tmp_path}/own.md")
    assert cards_of(hub, "me/run")[2:] == ["# Edited on the hub", "# Another card"]


@pytest.mark.parametrize("name", thinned(zoo.names(), "photos-naaf"))
def test_the_hub_takes_the_cards_of_the_zoo(python, hub, tmp_path, name) -> None:
    text = zoo.card(name, zoo.entries()[name].model_dump())
    model = from_pretrained("scenes-corrector")
    save_pretrained(model, tmp_path / "saved", half=True, card=text)
    answer = python(hub, tmp_path, PUSH_FOLDERS, f"{tmp_path}/saved", "me/m")
    assert f"{hub.url}/me/m/commit/" in answer
    assert cards_of(hub, "me/m") == [text]


@pytest.mark.parametrize("tag", thinned(["Apache-2.0", "other"], "other"))
def test_a_card_with_a_license_that_the_hub_does_not_know_is_refused(
    python, hub, tmp_path, tag
) -> None:
    card = f"---\nlicense: {tag}\n---\n# A card\n"
    model = from_pretrained("scenes-corrector")
    save_pretrained(model, tmp_path / "saved", half=True, card=card)
    answer = python(hub, tmp_path, PUSH_FOLDERS, f"{tmp_path}/saved", "me/m")
    assert "me/m: could not be pushed (" in answer
    assert '"license' in answer


@pytest.mark.slow
def test_a_push_that_the_hub_refuses_says_what_to_check(python, hub, tmp_path) -> None:
    hub.may_write = False
    answer = python(hub, tmp_path, PUSH)
    assert "me/corrector: could not be pushed (" in answer
    assert "not allowed to write" in answer
    assert "hf auth login" in answer


def test_python_programs_use_the_cache_that_the_variable_names(
    python, hub, model, tmp_path
) -> None:
    hub.commit("me/m", model)
    python(hub, tmp_path, LOAD)
    assert (tmp_path / "cache" / "pretrained" / "hub" / "me--m").is_dir()
    assert not (tmp_path / "home" / ".cache" / "counterfoil").exists()


MAKE_FOILS = "foils hf://me/m {picture} 'a red car'"


@pytest.mark.parametrize(
    "command",
    thinned(
        [
            MAKE_FOILS,
            "evaluate-foils scenes-corrector --foils hf://me/m --data scenes "
            "--option images=[2,2,2]",
            "train scenes/tags-dc-one-stage model.init_from=hf://me/m "
            "data.vocabulary={vocabulary} data.options.images=[8,4,4] data.captions=one "
            "train.epochs=1 train.batch_size=8 evaluation.max_images=4 --out {out}",
        ],
        MAKE_FOILS,
    ),
    ids=lambda command: command.split()[0],
)
def test_a_command_downloads_models_into_its_cache(python, hub, model, tmp_path, command) -> None:
    hub.commit("me/m", model)
    Image.new("RGB", (96, 96), "red").save(tmp_path / "red.png")
    vocabulary = zoo.FOLDER / "scenes-corrector" / "vocabulary.json"
    words = command.format(
        picture=tmp_path / "red.png", vocabulary=vocabulary, out=tmp_path / "run"
    )
    python(hub, tmp_path, COMMANDS, f"{words} --cache {tmp_path}/mine")
    assert (tmp_path / "mine" / "pretrained" / "hub" / "me--m").is_dir()
    assert not (tmp_path / "home" / ".cache" / "counterfoil").exists()


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install \"counterfoil\[hub\]\""):
        hub_library()
    with pytest.raises(MissingExtraError, match=r"counterfoil\[hub\]"):
        zoo.resolve("hf://me/m", cache=tmp_path)


@pytest.mark.parametrize(
    "text", ["hf://me", "hf://me/", "hf://me/a/b", "hf://../a", "hf://me/..", "hf://me/a@", "me/a"]
)
def test_what_is_no_address_on_the_hub(text) -> None:
    assert HUB_ADDRESS.fullmatch(text) is None
