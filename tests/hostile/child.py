"""Sends hostile files through their doors and prints what each ended in, with time and memory.

    python -m tests.hostile.child FOLDER [PART OF A NAME ...]

Runs in a process of its own: a file that takes too much ends this process, not the tests. One line
of JSON per case: its name, the class and message of its error, seconds of CPU, and the growth of
the peak of resident memory in MiB.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

import counterfoil as cf
from counterfoil.core import zoo
from counterfoil.core.config import load_config
from counterfoil.data.text.vocabulary import Vocabulary, load_vectors
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.compositional.readers import read_benchmark
from counterfoil.evaluation.judgements import read_judgements
from counterfoil.foils.files import read_foils
from counterfoil.models.importers import import_checkpoint
from counterfoil.training import report
from tests.data.tiny import write_scan
from tests.hostile.corpus import MIB, Case, all_cases
from tests.hostile.model_files import BASE
from tests.models.pickling import file_of

HANG_SECONDS = 120
ADDRESS_SPACE = 6 * 2**30
"""Most memory that a case may map: above what is allowed, below what would harm the machine."""


class HungError(BaseException):
    """A case that did not end; no reader catches it."""


class Skipped(Exception):
    """An item that a reader left out; the message lists the problems."""


def make_base(folder: Path) -> None:
    """An honest model, run and index, which cases copy."""
    write_scan(folder / "data", "train", 12)
    write_scan(folder / "data", "dev", 4)
    pairs = cf.load_pairs(folder / "data")
    model = cf.create("vse-fc", pairs, embed_size=8)
    cf.save_pretrained(model, folder / "model")
    cf.build_index(model, pairs.train, folder / "index")
    settings = {"epochs": 1, "batch_size": 8, "evaluation": {"bootstrap": 0}}
    report.plots_of = lambda records, split: {}  # charts, which take longer than the training
    cf.train(model, pairs, folder=folder / "run", progress=False, **settings)


class Doors:
    """What a user would call with a file, by the name that cases use."""

    def __init__(self, base: Path, server: str) -> None:
        self.base, self.server = base, server
        self.scenes = cf.load("scenes-naaf")
        with suppress(ImportError):  # the import itself takes seconds, of no case
            from transformers import AutoModel, CLIPModel  # noqa: F401
        self.words = Vocabulary.load(base / "model" / "vocabulary.json")

    def pairs(self, path: Path) -> None:
        pairs = cf.load_pairs(path, cache_dir=path.parent / "cache", dev_share=0)
        problems = [f"{one.kind}: {one}" for one in pairs.problems]
        raise Skipped("; ".join(problems) or f"nothing was wrong with {pairs}")

    def training(self, path: Path) -> None:
        pairs = cf.load_pairs(path, dev_share=0.34)
        model = cf.create("vse-fc", pairs, embed_size=8)
        cf.train(model, pairs, folder=path.parent / "run", progress=False, epochs=1, batch_size=2)

    def picture(self, path: Path) -> None:
        self.scenes.score([path], ["a dog"])

    def model(self, path: Path) -> None:
        cf.load(path, device="cpu")

    def checkpoint(self, path: Path) -> None:
        import_checkpoint(path, "scan")

    def vocabulary(self, path: Path) -> None:
        import_checkpoint(file_of("scan"), "scan", path)

    def resume(self, path: Path) -> None:
        pairs = cf.load_pairs(self.base / "data")
        model = cf.create("vse-fc", pairs, embed_size=8)
        cf.train(
            model, pairs, folder=path, progress=False, resume=True, epochs=1, batch_size=8,
            evaluation={"bootstrap": 0},
        )  # fmt: skip

    def runs(self, path: Path) -> None:
        from counterfoil.app.runs import Runs

        runs = Runs([path])
        listed, one = runs.listed(), runs.read(path.name)
        json.dumps([listed, one], allow_nan=False)
        raise Skipped(f"results: {one['results']}, {len(one['plots'])} plots, {one['warnings']}")

    def index(self, path: Path) -> None:
        opened = cf.open_index(path, device="cpu")
        hits = opened.search("caption 1 of image 2", k=3).hits
        raise Skipped(f"{len(hits)} hits")

    def recipe(self, path: Path) -> None:
        load_config(path)

    def download(self, path: Path) -> None:
        path.write_text(path.read_text().replace("URL", self.server))
        zoo.resolve("small", cache=path.parent / "cache", registry=path)

    def audit(self, path: Path) -> None:
        from counterfoil.app.content import Audit

        Audit(path)

    def merge(self, path: Path) -> None:
        from counterfoil.audit.decisions import DecisionLog
        from counterfoil.audit.merge import merge_log

        merge_log(DecisionLog(self.base), path, ())

    def foils(self, path: Path) -> None:
        raise Skipped(f"read: {list(read_foils(path))}")

    def judgements(self, path: Path) -> None:
        read_judgements(path)

    def benchmark(self, path: Path) -> None:
        raise Skipped(f"read: {read_benchmark('sugarcrepe', [path])}")

    def captions(self, path: Path) -> None:
        CaptionModel.read(path)

    def vectors(self, path: Path) -> None:
        load_vectors(path, self.words)


class Answers(BaseHTTPRequestHandler):
    """A hostile server: what it does is the first part of the path."""

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        if kind == "noise":
            self.wfile.write(b"\xff\x00" * 50)
            return
        if kind in ("to-file", "circle"):
            self.send_response(302)
            target = "file:///etc/passwd" if kind == "to-file" else self.path
            self.send_header("Location", target)
            self.end_headers()
            return
        self.send_response(500 if kind == "500" else 200)
        self.end_headers()
        try:
            if kind == "endless":
                for _ in range(4096):
                    self.wfile.write(bytes(MIB // 4))
            elif kind != "short":
                self.wfile.write(b"evil")
        except OSError:
            pass  # the client has had enough

    def log_message(self, *_: object) -> None:
        pass


def peak_reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def outcome(door: Callable[[Path], None], case: Case, path: Path) -> dict[str, Any]:
    peak_reset()
    before, started, error = memory("VmRSS"), time.process_time(), ("none", "it was accepted")
    signal.alarm(HANG_SECONDS)
    try:
        door(path)
    except Skipped as skip:
        error = ("skip", str(skip))
    except (Exception, HungError) as raised:
        error = (type(raised).__name__, str(raised))
    finally:
        signal.alarm(0)
    seconds = time.process_time() - started
    grown = memory("VmHWM") - before
    return {
        "name": case.name, "error": error[0], "message": error[1], "seconds": seconds, "mib": grown,
    }  # fmt: skip


def main(folder: Path, *parts: str) -> None:
    def hung(*_: object) -> None:
        raise HungError

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hung)
    make_base(folder / BASE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    doors = Doors(folder / BASE, f"http://127.0.0.1:{server.server_address[1]}")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for number, case in enumerate(all_cases()):
        if parts and not any(part in case.name for part in parts):
            continue
        own = folder / f"case-{number}"
        own.mkdir()
        path = case.make(own)
        print(json.dumps(outcome(getattr(doors, case.door), case, path)), flush=True)
        shutil.rmtree(own)
    server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
