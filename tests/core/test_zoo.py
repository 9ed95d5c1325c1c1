"""The zoo: its registry is whole, and a name leads to the files that it lists."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from counterfoil.core import zoo
from counterfoil.core.errors import CheckpointError

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
            zoo.check_files(zoo.FOLDER / name, entry)
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


def test_a_shipped_name_leads_to_its_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert zoo.resolve("scenes-naaf") == zoo.FOLDER / "scenes-naaf"
    assert zoo.is_pretrained("scenes-naaf")
    assert zoo.is_read_only(zoo.resolve("scenes-naaf"))


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
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(No such file"):
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
