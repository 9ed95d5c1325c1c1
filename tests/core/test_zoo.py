"""The zoo: its registry is whole, and a name leads to the files that it lists."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from counterfoil.core import zoo
from counterfoil.core.errors import CheckpointError
from counterfoil.core.storage.download import DownloadError
from counterfoil.models import from_pretrained
from tests.core.storage.file_server import serving

MOST_BYTES = 25_000_000


@pytest.fixture
def own(tmp_path) -> Path:
    """A registry of one model, copied from the package."""
    shutil.copytree(zoo.FOLDER / "scenes-corrector", tmp_path / "zoo" / "scenes-corrector")
    registry = tmp_path / "zoo" / "registry.yaml"
    entry = zoo.entries()["scenes-corrector"].model_dump()
    registry.write_text(yaml.safe_dump({"scenes-corrector": entry}))
    return registry


def test_the_package_holds_the_files_of_its_registry_and_no_others() -> None:
    listed = {zoo.REGISTRY}
    for name, entry in zoo.entries().items():
        if entry.url is None:
            assert zoo.resolve(name) == zoo.FOLDER / name  # the checksums of all files are right
            listed |= {zoo.FOLDER / name / file for file in entry.files}
    assert {path for path in zoo.FOLDER.rglob("*") if path.is_file()} == listed


def test_the_zoo_is_small_enough_to_be_shipped() -> None:
    assert sum(path.stat().st_size for path in zoo.FOLDER.rglob("*")) <= MOST_BYTES


@pytest.mark.parametrize("name", zoo.names())
def test_a_card_says_all_that_the_registry_does(name) -> None:
    entry = zoo.entries()[name]
    text = (zoo.FOLDER / name / zoo.CARD).read_text(encoding="utf-8")
    assert text == zoo.card(name, entry.model_dump())
    for result in entry.results:
        assert result.command.startswith("counterfoil ")
        assert name in result.command


@pytest.mark.parametrize(
    ("terms", "tags"),
    [
        ({"license": "Apache-2.0"}, {"license": "apache-2.0"}),
        ({"license": "other"}, {"license": "other", "license_name": "research-only"}),
        (
            {"license": "other", "license_name": "course-only"},
            {"license": "other", "license_name": "course-only"},
        ),
    ],
    ids=str,
)
def test_a_card_states_its_license_as_the_hub_wants_it(terms, tags) -> None:
    described = zoo.entries()["scenes-naaf"].model_dump(exclude={"license_name"}) | terms
    text = zoo.card("scenes-naaf", described)
    front = yaml.safe_load(text.split("---\n")[1])
    assert {key: front[key] for key in front if key.startswith("license")} == tags
    assert f"- **License:** {terms['license']}. " in text


def test_a_shipped_name_leads_to_its_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert zoo.resolve("scenes-naaf") == zoo.FOLDER / "scenes-naaf"
    assert zoo.is_pretrained("scenes-naaf")


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenes-naaf").mkdir()
    assert zoo.resolve("scenes-naaf") == Path("scenes-naaf")
    assert not zoo.is_pretrained("scenes-naaf")


def test_paths_stay_as_they_are(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("runs/scenes-naaf")):
        assert zoo.resolve(path) == path


def test_an_unknown_name_is_answered_with_the_nearest_and_the_list() -> None:
    with pytest.raises(CheckpointError, match=r"scene-naff: neither a run nor .*") as caught:
        zoo.resolve("scene-naff")
    assert "did you mean 'scenes-naaf'?" in str(caught.value)
    assert all(name in str(caught.value) for name in zoo.names())


def test_names_match_a_pattern() -> None:
    assert zoo.names("*-naaf") == [name for name in zoo.names() if name.endswith("-naaf")]
    assert zoo.names("nothing*") == []


def test_a_changed_file_is_refused_and_named(own) -> None:
    assert zoo.resolve("scenes-corrector", registry=own) == own.parent / "scenes-corrector"
    path = own.parent / "scenes-corrector" / "vocabulary.json"
    path.write_text(path.read_text().replace("a", "b", 1))
    with pytest.raises(CheckpointError, match=r"vocabulary\.json: not the file of the registry"):
        zoo.resolve("scenes-corrector", registry=own)


def test_a_missing_file_is_refused_and_named(own) -> None:
    (own.parent / "scenes-corrector" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        zoo.resolve("scenes-corrector", registry=own)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"summary": 5}, "summary"),
        ({"more": 1}, "more"),
        ({"results": []}, "results"),
        ({"files": {"../x.json": {"sha256": "0" * 64, "size": 1}}}, "not a file of a saved model"),
        ({"files": {"model.pt": {"sha256": "0" * 64, "size": 1}}}, "not a file of a saved model"),
        ({"files": {"config.json": {"sha256": "0", "size": 1}}}, "sha256"),
        ({"files": {"config.json": {"sha256": "0" * 64, "size": -1}}}, "size"),
        ({"files": {"config.json": {"sha256": "0" * 64, "size": 1}}}, "missing: README.md"),
    ],
    ids=str,
)
def test_a_registry_with_a_mistake_names_it(own, change, complaint) -> None:
    tree = yaml.safe_load(own.read_text())
    tree["scenes-corrector"] |= change
    own.write_text(yaml.safe_dump(tree))
    with pytest.raises(CheckpointError, match=r"registry\.yaml: ") as caught:
        zoo.entries(own)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "5", "[]", "a: [", "Upper: {}", "a/b: {}", "!!python/x 1"])
def test_what_is_no_registry_is_refused(tmp_path, text) -> None:
    (tmp_path / "registry.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"registry\.yaml: "):
        zoo.entries(tmp_path / "registry.yaml")


@pytest.fixture
def remote(own):
    """A server of the files of a model, and a registry that names them by their address."""
    folder = own.parent / "scenes-corrector"
    with serving({path.name: path.read_bytes() for path in folder.iterdir()}) as server:
        shutil.rmtree(folder)
        tree = yaml.safe_load(own.read_text())
        tree["scenes-corrector"]["url"] = server.url
        own.write_text(yaml.safe_dump(tree))
        yield server, own


def fetched(registry: Path, cache: Path) -> Path:
    return zoo.resolve("scenes-corrector", cache=cache, registry=registry)


def test_the_cache_is_the_one_that_the_variable_names_at_the_call(
    remote, tmp_path, monkeypatch
) -> None:
    _, registry = remote
    monkeypatch.setenv("COUNTERFOIL_CACHE", str(tmp_path / "named"))
    folder = zoo.resolve("scenes-corrector", registry=registry)
    assert folder.is_relative_to(tmp_path / "named")
    assert zoo.location("scenes-corrector", registry=registry) == "cached"
    monkeypatch.setenv("COUNTERFOIL_CACHE", str(tmp_path / "another"))
    assert zoo.location("scenes-corrector", registry=registry) == "to download"


def test_a_registered_model_is_downloaded_once_and_loads(remote, tmp_path) -> None:
    server, registry = remote
    where = {"cache": tmp_path / "cache", "registry": registry}
    assert zoo.location("scenes-corrector", **where) == "to download"
    folder = fetched(registry, tmp_path / "cache")
    assert folder.is_relative_to(tmp_path / "cache")
    from_pretrained(folder)
    assert zoo.location("scenes-corrector", **where) == "cached"
    command = len(server.requests)
    assert fetched(registry, tmp_path / "cache") == folder
    assert len(server.requests) == command == len(zoo.entries(registry)["scenes-corrector"].files)


def test_a_model_whose_download_broke_off_goes_on(remote, tmp_path) -> None:
    server, registry = remote
    size = len(server.files["model.safetensors"])
    server.cuts = [10**9] * 3 + [size // 2, 0, 0, 0]  # files are fetched in the registry's order
    with pytest.raises(DownloadError, match="the download continues"):
        fetched(registry, tmp_path)
    server.sent = 0
    from_pretrained(fetched(registry, tmp_path))
    rest = [name for name in server.files if name > "model.safetensors"]
    assert server.sent == size - size // 2 + sum(len(server.files[name]) for name in rest)


def test_a_wrong_file_on_the_server_is_refused_and_not_kept(remote, tmp_path) -> None:
    server, registry = remote
    server.files["config.json"] = server.files["config.json"].replace(b"96", b"97")
    with pytest.raises(CheckpointError, match=r"config\.json: refused and deleted"):
        fetched(registry, tmp_path)
    assert not list(tmp_path.rglob("config.json*"))


def test_a_file_that_changed_in_the_cache_is_refused_deleted_and_fetched_anew(
    remote, tmp_path
) -> None:
    _, registry = remote
    path = fetched(registry, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not the file of the registry"):
        fetched(registry, tmp_path)
    assert not path.exists()
    from_pretrained(fetched(registry, tmp_path))


def test_without_a_network_the_error_says_what_to_do_and_doing_it_helps(remote, tmp_path) -> None:
    server, registry = remote
    tree = yaml.safe_load(registry.read_text())
    with serving({}) as gone:
        tree["scenes-corrector"]["url"] = gone.url
    registry.write_text(yaml.safe_dump(tree))
    with pytest.raises(DownloadError, match="Connection refused") as caught:
        fetched(registry, tmp_path)
    folder = Path(str(caught.value).partition(" into ")[2].partition(": ")[0])
    assert all(name in str(caught.value) for name in (*server.files, gone.url))
    for name, data in server.files.items():  # by hand
        (folder / name).write_bytes(data)
    from_pretrained(fetched(registry, tmp_path))


TOGETHER = """
import sys
from pathlib import Path
from counterfoil.core import zoo
folder = zoo.resolve("scenes-corrector", cache=sys.argv[1], registry=Path(sys.argv[2]))
print(folder)
"""


@pytest.mark.slow
def test_two_processes_that_download_at_once_both_get_the_model(remote, tmp_path) -> None:
    server, registry = remote
    words = [sys.executable, "-c", TOGETHER, str(tmp_path / "cache"), str(registry)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    from_pretrained(folders.pop())
    assert server.sent == sum(map(len, server.files.values())), "each file was sent once"


def test_the_zoo_is_listed_without_torch() -> None:
    code = (
        "import sys; from counterfoil.core import zoo; zoo.entries(); zoo.resolve('scenes-naaf'); "
        "print(any(name in sys.modules for name in ('torch', 'huggingface_hub')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
