"""A small service that runs for real: a trained NAAF, a corrector, an audit, on a free port."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from counterfoil.app.application import listen, make_server
from counterfoil.app.connections import Limits
from counterfoil.app.content import Content, open_content
from counterfoil.audit.findings import Corrected, Finding, Reason, WrongWord
from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.data.images import open_image
from counterfoil.evaluation.evaluate import report_scores
from counterfoil.models import create_model, save_pretrained
from counterfoil.models.match import YARDSTICK
from counterfoil.models.yardstick import measure_yardstick
from counterfoil.scoring.encode import score_split
from counterfoil.training.run_data import read_data
from counterfoil.training.trainer import Trainer
from tests.app.browser import Browser, find_browser
from tests.conftest import built_once

DATA = {"source": "scenes", "options": {"images": [64, 8, 24]}, "min_count": 1}
NAAF = {
    "name": "naaf",
    "embed_size": 32,
    "text": {"word_dim": 32},
    "matcher": {"mining": False, "boundary": 0.8},
}
CORRECTOR = {
    "name": "uniter-small",
    "embed_size": 16,
    "matcher": {"layers": 1, "heads": 2, "extras": ["discrimination", "correction"]},
}
LIMITS = Limits(upload_bytes=2**20, pixels=2_000_000, uploads=4)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Asks the service over a real connection."""

    host: str
    port: int

    @property
    def base(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            found = {key.lower(): value for key, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, value: Any) -> Answer:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self.ask("POST", path, body, {"Content-Type": "application/json"})

    def upload(self, data: bytes, name: str = "photo.png", **headers: str) -> Answer:
        edge = "edge-of-a-part"
        head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        body = (
            f"{head}Content-Type: image/png\r\n\r\n".encode()
            + data
            + f"\r\n--{edge}--\r\n".encode()
        )
        kind = f"multipart/form-data; boundary={edge}"
        return self.ask("POST", "/api/images", body, {"Content-Type": kind, **headers})


@pytest.fixture(scope="session")
def pairs(cache):
    return read_data(build_config({"data": DATA}), cache, Silent())


@pytest.fixture(scope="session")
def run(tmp_path_factory, pairs) -> Path:
    """A NAAF, trained for a moment, with its results."""

    def train(runs: Path) -> None:
        folder = runs / "small-naaf"
        settings = {"epochs": 2, "batch_size": 40, "optimizer": {"lr": 0.003}}
        config = build_config({"data": DATA, "model": NAAF, "train": settings})
        torch.manual_seed(0)
        model = create_model(config.model, pairs.train, config.data)
        model.fragments_from = "segments"
        Trainer(model, pairs, config, folder).run()
        report = report_scores([score_split(model, pairs.test)], "test", bootstrap=0)
        (folder / "results.json").write_text(report.to_json())
        # The method of word effects is NAAF's own: which one does better on eight images is chance.
        yardstick = measure_yardstick(model, pairs["dev"])
        assert yardstick is not None
        (folder / YARDSTICK).write_text(yardstick.to_json())

    return built_once(tmp_path_factory, "app-runs", train) / "small-naaf"


@pytest.fixture(scope="session")
def corrector(tmp_path_factory, pairs) -> Path:
    """A model with the heads of TAGS-DC; it was taught nothing, but it has opinions."""
    folder = tmp_path_factory.mktemp("app-corrector")
    config = build_config({"data": DATA, "model": CORRECTOR})
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    model.fragments_from = "segments"
    save_pretrained(model, folder)
    return folder


@pytest.fixture(scope="session")
def audit(tmp_path_factory, pairs) -> Path:
    """The findings of an audit, hostile text included."""
    folder = tmp_path_factory.mktemp("app-audit")
    findings = [
        finding(pairs.test.ids[place], text, "other-image" if place % 2 else "wrong-words")
        for place, text in enumerate(
            ["a red dog on a beach", "<img src=x onerror=alert(1)> & “quotes”", "two cows"]
        )
    ]
    lines = "".join(found.to_json(indent=None) + "\n" for found in findings)
    (folder / "findings.jsonl").write_text(lines, encoding="utf-8")
    notes = ["<b>a note</b>", *(f"note {number}" for number in range(2, 5))]
    (folder / "summary.json").write_text(json.dumps({"notes": notes}), encoding="utf-8")
    return folder


def finding(image: str, text: str, sign: Any) -> Finding:
    word = WrongWord(word="red", span=(2, 5), effect=-0.1, usual=0.2, suggestions=("brown",))
    fixed = text.replace("red", "brown")
    return Finding(
        kind="mismatch",
        split="test",
        image=image,
        caption=0,
        text=text,
        suspicion=0.9,
        score=0.1,
        quantile=0.01,
        rank=7,
        compared=24,
        margin=-0.2,
        reasons=(Reason(sign=sign, strength=0.9, text="it fits another image better"),),
        wrong_words=(word,) if "red" in text else (),
        words_examined=True,
        better_image=None,
        better_caption=None,
        near_duplicate=None,
        near_duplicate_images=0,
        correction=Corrected(text=fixed, before=0.1, after=0.4, changes=(("red", "brown"),)),
    )


@pytest.fixture(scope="session")
def content(run, corrector, audit, cache) -> Content:
    return open_content(run, corrector=corrector, audit=audit, cache=cache, progress=Silent())


@contextmanager
def running(
    content: Content, limits: Limits, host: str = "127.0.0.1", **options: Any
) -> Iterator[Client]:
    """A service on a free port of this machine; ``content`` is open still when it has stopped."""
    listening = listen(host, 0)
    server = make_server(replace(content, close=lambda: None), "127.0.0.1", limits, **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        time.sleep(0.01)
    try:
        yield Client("127.0.0.1", listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def client(content) -> Iterator[Client]:
    with running(content, LIMITS) as started:
        yield started
    content.close()


@pytest.fixture(scope="session")
def photo(pairs) -> bytes:
    """An image of the test split, as a file."""
    buffer = io.BytesIO()
    open_image(pairs.test.pixels[3]).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
