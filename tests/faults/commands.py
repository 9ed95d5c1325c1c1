"""Every command that writes for long, on tiny scenes, and what a kill must not change of it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from counterfoil.data.scenes import describe, draw, make_scene
from tests.faults.children import (
    Ended,
    Moment,
    digests,
    import_all,
    import_as,
    remains,
    run_child,
    survivors,
)

SCENES = ["data.options.images=[24,8,8]", "data.options.captions=2", "data.min_count=1"]
SMALL = ["train.epochs=3", "train.batch_size=16", "train.save_every=2", "train.log_every=1"]
FAST = ["evaluation.bootstrap=0", "data.workers=2"]
EMBEDDING = ["model.embed_size=16", "model.text.word_dim=8", "train.schedule.warmup_steps=2"]
TRANSFORMER = [
    "model.embed_size=16", "model.init_from=null", "model.matcher.layers=1",
    "model.matcher.heads=2", "train.schedule.warmup_steps=2", "objective.tags-dc.masks=2",
    "objective.tags-dc.samples=2", "objective.tags-dc.kept=2",
]  # fmt: skip
RUN_FILES = (
    "run/metrics.jsonl", "run/results.json", "run/yardstick.json", "run/correction_rule.json",
    "run/last/*.safetensors", "run/last/*.json", "run/best/*.safetensors", "run/best/*.json",
)  # fmt: skip
DATA = ["--option", "images=[24,8,8]", "--option", "captions=2"]


@dataclass(frozen=True)
class Workload:
    """One command: its words in the folder of a try, those after a kill, and its result.

    ``result`` are patterns of files that must have the same bytes as those of an undisturbed run,
    ``exist`` files whose content has times. ``start`` names what is copied into the folder first,
    as ``start_as``.
    """

    name: str
    words: Callable[[Path, Path], list[str]]
    words_after_kill: Callable[[Path, Path], list[str]]
    result: tuple[str, ...]
    exist: tuple[str, ...] = ()
    start: str | None = None
    start_as: str = "index"
    stages: tuple[str, ...] = ()
    """Stages that some kills are aimed at."""
    done: str | None = None
    """What a repeated command says if nothing was left to do."""


def _train(name: str, recipe: str, settings: list[str], guide: bool = False) -> Workload:
    def words(root: Path, folder: Path) -> list[str]:
        guided = [f"objective={{selhn: {{}}, ndgl: {{guide: {root}/guide}}}}"] if guide else []
        named = [recipe, *SCENES, *SMALL, *FAST, *settings, *guided]
        return ["train", *named, "--out", f"{folder}/run", "--cache", f"{root}/cache"]

    def words_after_kill(root: Path, folder: Path) -> list[str]:
        if not (folder / "run" / "config.yaml").is_file():
            return words(root, folder)
        return ["train", "--resume", f"{folder}/run", "--cache", f"{root}/cache"]

    stages = ("save", "validation", "first step after a resume")
    return Workload(name, words, words_after_kill, RUN_FILES, ("run/report.html",), stages=stages)


def _same(
    words: Callable[[Path, Path], list[str]],
) -> tuple[Callable[[Path, Path], list[str]], ...]:
    return words, words


def _foils(root: Path, folder: Path) -> list[str]:
    options = ["--split", "train", "--masks", "2", "--samples", "2"]
    out = ["--out", f"{folder}/foils.jsonl", "--cache", f"{root}/cache", "--overwrite"]
    return ["foils", f"{root}/runs/tags-dc", *options, *out]


def _features(root: Path, folder: Path) -> list[str]:
    out = ["--out", f"{folder}/out", "--cache", f"{folder}/cache", "--overwrite"]
    return ["features", f"{root}/photos/captions.csv", "--backbone", "segments", *out]


def _features_part(root: Path, folder: Path, part: str = "1/2") -> list[str]:
    out = ["--out", f"{folder}/out", "--part", part]
    return ["features", f"{root}/photos/captions.csv", "--backbone", "segments", *out]


def _features_merge(root: Path, folder: Path) -> list[str]:
    out = ["--out", f"{folder}/out", "--merge", "--overwrite"]
    return ["features", f"{root}/photos/captions.csv", "--backbone", "segments", *out]


def _guide(root: Path, folder: Path) -> list[str]:
    out = ["--out", f"{folder}/guide", "--cache", f"{root}/cache"]
    return ["guide", "build", f"{root}/runs/vse", f"{root}/runs/naaf", *out]


def _audit(root: Path, folder: Path) -> list[str]:
    out = ["--out", f"{folder}/audit", "--cache", f"{root}/cache"]
    return ["audit", "check", f"{root}/runs/vse", "--split", "train", *out]


def _reproduce(root: Path, folder: Path) -> list[str]:
    rows = ["--rows", "vse-fc-*", "--scale", "smoke", "--seeds", "1"]
    small = [*SCENES, *SMALL, *FAST, *EMBEDDING]
    out = ["--out", f"{folder}/out", "--cache", f"{root}/cache"]
    return ["reproduce", "selhn.table1", *small, *rows, *out]


def _index(root: Path, folder: Path) -> list[str]:
    out = ["--out", f"{folder}/index", "--cache", f"{root}/cache", "--recall-queries", "4"]
    return ["index", "build", f"{root}/runs/vse", "scenes", *DATA, "--split", "test", *out]


def _index_after_kill(root: Path, folder: Path) -> list[str]:
    if not (folder / "index").exists():
        return _index(root, folder)
    return _index_add(root, folder, "test")


def _index_part(root: Path, folder: Path, part: str = "1/2") -> list[str]:
    return [*_index(root, folder), "--part", part]


def _index_merge(root: Path, folder: Path) -> list[str]:
    return [*_index(root, folder), "--merge", "--overwrite"]


def _index_add(root: Path, folder: Path, split: str = "dev") -> list[str]:
    more = ["--existing", "skip", "--split", split, "--recall-queries", "0"]
    return ["index", "add", f"{folder}/index", "scenes", *DATA, *more, "--cache", f"{root}/cache"]


def _index_remove(root: Path, folder: Path) -> list[str]:
    return ["index", "remove", f"{folder}/index", "scene-test-000000", "scene-test-000003"]


def _index_compact(root: Path, folder: Path) -> list[str]:
    return ["index", "compact", f"{folder}/index"]


INDEX = ("index/**/*",)
SEGMENTS = ("index/**/segments/*/*",)  # the manifests count commits
WORKLOADS = {
    one.name: one
    for one in (
        _train("train RVSE", "scenes/rvse-mlp", EMBEDDING),
        _train("train NAAF", "scenes/naaf", [*EMBEDDING, "model.matcher.adjust_epoch=2"]),
        _train("train SelHN + NDGL", "scenes/rvse-mlp", EMBEDDING, guide=True),
        _train("train TAGS-DC", "scenes/tags-dc-one-stage", TRANSFORMER),
        Workload("features", *_same(_features), ("out/**/*",)),
        Workload("features --part", *_same(_features_part), ("out.parts/**/*",)),
        Workload(
            "features --merge",
            *_same(_features_merge),
            ("out/**/*",),
            start="features-parts",
            start_as="out.parts",
        ),
        Workload("guide", *_same(_guide), ("guide/**/*",)),
        Workload("foils", *_same(_foils), ("foils.jsonl",)),
        Workload("audit", *_same(_audit), ("audit/*",)),
        Workload("index build", _index, _index_after_kill, INDEX),
        Workload("index add", *_same(_index_add), INDEX, start="index"),
        Workload("index remove", *_same(_index_remove), INDEX, start="index", done="no such id"),
        Workload("index compact", *_same(_index_compact), SEGMENTS, start="removed"),
        Workload("index --part", *_same(_index_part), ("index.parts/**/*",)),
        Workload(
            "index --merge",
            *_same(_index_merge),
            INDEX,
            start="index-parts",
            start_as="index.parts",
        ),
        Workload(
            "reproduce",
            *_same(_reproduce),
            ("out/**/metrics.jsonl", "out/**/*.safetensors", "out/*.md"),
        ),
    )
}


def draw_photos(folder: Path, count: int = 130) -> None:
    """A folder of drawn photos with a table of captions; more than two chunks of an extractor."""
    folder.mkdir(parents=True)
    lines = ["image,caption"]
    for number in range(count):
        scene = make_scene((0, 0, number, 0))
        draw(scene).resize((96, 96)).save(folder / f"{number:03d}.png")
        (caption,) = describe(scene, random.Random(number), n=1)
        lines.append(f'{number:03d}.png,"{caption.text}"')
    (folder / "captions.csv").write_text("\n".join(lines))


class Workplace:
    """Data, runs and an index in one folder, made once, that all tries start from."""

    def __init__(self, root: Path) -> None:
        import_all()
        self.root = root
        self.references: dict[str, Reference] = {}

    def prepare(self, names: list[str]) -> Iterator[str]:
        """Make what the named workloads start from; yields what is made next."""
        trained = {
            "runs/vse": "train RVSE",
            "runs/naaf": "train NAAF",
            "runs/tags-dc": "train TAGS-DC",
        }
        needs = {
            "train SelHN + NDGL": ["runs/vse", "guide"],
            "guide": ["runs/vse", "runs/naaf"],
            "foils": ["runs/tags-dc"],
            "audit": ["runs/vse"],
            "features": ["photos"],
            "index build": ["runs/vse"],
            "index add": ["runs/vse", "index"],
            "index remove": ["runs/vse", "index"],
            "index compact": ["runs/vse", "index", "removed"],
            "features --part": ["photos"],
            "features --merge": ["photos", "features-parts"],
            "index --part": ["runs/vse"],
            "index --merge": ["runs/vse", "index-parts"],
        }
        wanted = [need for name in names for need in needs.get(name, [])]
        for need in dict.fromkeys(wanted):
            if (self.root / need).exists():
                continue
            yield need
            making = self.root / "making"
            shutil.rmtree(making, ignore_errors=True)
            if need == "photos":
                draw_photos(making / "photos")
                made = making / "photos"
            elif need in trained:
                self._run(WORKLOADS[trained[need]].words(self.root, making), making)
                made = making / "run"
            elif need == "guide":
                out = ["--out", f"{making}/guide", "--cache", f"{self.root}/cache"]
                self._run(["guide", "build", f"{self.root}/runs/vse", *out], making)
                made = making / "guide"
            elif need == "index":
                self._run(_index(self.root, making), making)
                made = making / "index"
            elif need in ("index-parts", "features-parts"):
                make, name = (_index_part, "index") if "index" in need else (_features_part, "out")
                for part in ("1/2", "2/2"):
                    self._run(make(self.root, making, part), making)
                made = making / f"{name}.parts"
            else:
                shutil.copytree(self.root / "index", making / "index")
                self._run(_index_remove(self.root, making), making)
                made = making / "index"
            (self.root / need).parent.mkdir(parents=True, exist_ok=True)
            made.rename(self.root / need)

    def _run(self, words: list[str], folder: Path) -> Ended:
        ended = run_child(words, folder)
        if ended.code != 0:
            raise AssertionError(f"{' '.join(words)}: {ended.output[-3000:]}")
        import_as(folder)
        return ended

    def start(self, workload: Workload, name: str) -> Path:
        """A new folder for one try."""
        folder = self.root / "tries" / f"{workload.name.replace(' ', '-')}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if workload.start is not None:
            shutil.copytree(self.root / workload.start, folder / workload.start_as)
        return folder

    def reference(self, workload: Workload) -> Reference:
        """The undisturbed run, made once."""
        if workload.name not in self.references:
            folder = self.start(workload, "reference")
            self._run(workload.words(self.root, folder), folder)
            folder = self.start(workload, "reference")  # again, for its time without imports
            ended = self._run(workload.words(self.root, folder), folder)
            files = digests(folder, workload.result)
            assert files, f"{workload.name}: no results"
            self.references[workload.name] = Reference(ended, files)
        return self.references[workload.name]

    def try_kills(self, workload: Workload, moments: list[Moment], name: str) -> Try:
        """Kill a command at each moment in turn, let it finish, and compare its files."""
        expected, folder = self.reference(workload).files, self.start(workload, name)
        outcome, words = Try(), workload.words
        for moment in moments:
            ended = run_child(words(self.root, folder), folder / "child", moment)
            if not ended.killed:
                if ended.code != 0:
                    outcome.problems.append(f"exit code {ended.code}: {ended.output[-1500:]}")
                break
            outcome.kills.append((str(moment), ended.where))
            outcome.pids.append(ended.pid)
            words = workload.words_after_kill
        files = digests(folder, workload.result)
        missing = [name for name in workload.exist if not (folder / name).is_file()]
        # complete files may lie beside a lock: the next command clears what the killed one left
        if outcome.kills and (files != expected or missing or remains(folder)):
            ended = run_child(words(self.root, folder), folder / "child")
            done = workload.done is not None and workload.done in ended.output
            if ended.code != 0 and not done:
                outcome.problems.append(f"exit code {ended.code}: {ended.output[-1500:]}")
            files = digests(folder, workload.result)
            missing = [name for name in workload.exist if not (folder / name).is_file()]
        different = sorted(n for n in {*files, *expected} if files.get(n) != expected.get(n))
        if different or missing:
            outcome.problems.append(f"differs after a kill: {', '.join([*different, *missing])}")
        outcome.remains = remains(folder)
        for pid in outcome.pids:
            if left := survivors(pid):
                outcome.problems.append(f"processes {left} of the killed one are left")
        if not outcome.problems:
            shutil.rmtree(folder)
        return outcome


def draw_moments(
    workload: Workload,
    whole: Ended,
    number: int,
    tries: int,
    rng: random.Random,
    share: float = 1.0,
) -> list[Moment]:
    """Moments for try ``number`` of ``tries``, which together cover a ``share`` of a run.

    Half of them are times, one in each part of the run; the others are aimed at operations on the
    disk or, in training, at saving, validation and the first step after a resume.
    """
    after = Moment(seconds=share * whole.seconds * (number + rng.random()) / tries)
    if number % 2 == 0:
        return [after]
    if not workload.stages:
        return [Moment(operation=rng.randint(1, max(1, whole.operations())))]
    stage = workload.stages[number // 2 % len(workload.stages)]
    if stage == "first step after a resume":
        early = Moment(seconds=share * whole.seconds * rng.uniform(0.3, 0.7))
        return [early, Moment(stage="step", seconds=rng.uniform(0, 0.05))]
    occurrence = rng.randint(1, whole.occurrences(stage))
    if stage == "save" and rng.random() < 0.7:
        operation = rng.randint(1, whole.operations("save"))
        return [Moment(stage=stage, occurrence=occurrence, operation=operation)]
    return [Moment(stage=stage, occurrence=occurrence, seconds=rng.uniform(0, 0.1))]


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: how it went, and the SHA-256 of its files."""

    ended: Ended
    files: dict[str, str]


@dataclass
class Try:
    """One command that was killed once or several times, and then finished."""

    kills: list[tuple[str, str]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remains: list[str] = field(default_factory=list)
