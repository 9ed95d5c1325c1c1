"""Build a guide for data of Flickr30K's shape, kill it half way, resume it, print its memory.

    python benchmarks/guide_build.py                       # 29,000 images, 145,000 captions
    python benchmarks/guide_build.py --images 300 --dim 64 --embed 32

Features are random halves, captions random words, the teacher an untrained vse-infty. The build is
`counterfoil guide build` in a process of its own: the first is killed (SIGKILL) when half of its
work is done, the second finishes it. A few entries are then compared with the teacher's direct
scores. Exits with 1 where one is wrong, or where the resident memory of either part is above the
limit.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import write_array_header_2_0

from counterfoil.core.config import build_config
from counterfoil.core.errors import DataError
from counterfoil.data.load import load_pairs
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import WordText
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.models import from_pretrained
from counterfoil.models.catalogue import resolve
from counterfoil.models.model import Model
from counterfoil.models.store import save_pretrained
from counterfoil.training.guides.guide import open_guide
from counterfoil.training.guides.manifest import read_manifest
from counterfoil.training.run_folder import write_config

WORDS, CHUNK = 2000, 64


def make_data(folder: Path, images: int, regions: int, dim: int, captions: int) -> None:
    """SCAN's layout, features written a chunk at a time."""
    rng = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(WORDS)])
    for split, count in {"train": images, "dev": 20}.items():
        with (folder / f"{split}_ims.npy").open("wb") as file:
            header = {"descr": "<f2", "fortran_order": False, "shape": (count, regions, dim)}
            write_array_header_2_0(file, header)
            for start in range(0, count, CHUNK):
                rows = min(CHUNK, count - start)
                numbers = rng.standard_normal((rows, regions, dim), dtype=np.float32)
                file.write(numbers.astype("<f2").tobytes())
        with (folder / f"{split}_caps.txt").open("w", encoding="utf-8") as file:
            for _ in range(count * captions):
                file.write(" ".join(rng.choice(words, rng.integers(6, 20))) + "\n")
        ids = "\n".join(str(1_000_000 + number) for number in range(count))
        (folder / f"{split}_ids.txt").write_text(ids + "\n")


def make_teacher(run: Path, data: Path, dim: int, embed: int) -> None:
    """A run folder as training leaves it, with weights nobody trained."""
    config = build_config(
        {
            "data": {"source": str(data), "min_count": 1},
            "model": {"name": "vse-infty", "embed_size": embed},
        }
    )
    write_config(run, config)
    words = Vocabulary.build([f"word{number}" for number in range(WORDS)], 1)
    torch.manual_seed(0)
    save_pretrained(Model(resolve(config.model), dim, WordText(words)), run / "best")


def build(run: Path, guide: Path, options: argparse.Namespace, until: float) -> dict[str, float]:
    """Run the command, to the end or until a share of the work is done; its peak memory."""
    command = [sys.executable, "-m", "counterfoil", "guide", "build", str(run), "--out", str(guide)]
    command += ["--device", options.device, "--cache", str(guide.parent / "cache")]
    command += ["--form", options.form] if options.form else []
    started = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    killed, peak = False, 0.0
    while child.poll() is None:
        peak = max(peak, peak_resident_mb(child.pid))
        if not killed and share_done(guide) >= until:
            child.send_signal(signal.SIGKILL)
            killed = True
        time.sleep(0.002)
    if child.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"the build failed with exit code {child.returncode}")
    return {
        "killed": float(child.returncode == -signal.SIGKILL),
        "done": round(share_done(guide), 3),
        "seconds": round(time.monotonic() - started, 1),
        "resident_mb_peak": round(peak),
    }


def peak_resident_mb(pid: int) -> float:
    """By the kernel's own count; that of getrusage would include what this process held."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max(
        (int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), default=0
    )


def share_done(guide: Path) -> float:
    try:
        return read_manifest(guide).share_done
    except DataError:
        return 0.0


def largest_error(guide: Path, run: Path, split: Split, entries: int) -> float:
    """Of a few random entries, the guide's against direct scoring."""
    model = from_pretrained(run / "best")
    rng = np.random.default_rng(1)
    images = np.sort(rng.choice(len(split), entries, replace=False))
    captions = np.sort(rng.choice(len(split.texts), entries, replace=False))
    assert split.fragments is not None
    direct = model.score(
        [split.fragments.read(int(i)) for i in images], [split.texts[t] for t in captions]
    )
    ids = torch.from_numpy(images), torch.from_numpy(captions)
    found = open_guide(guide, split).scores(*ids, torch.device("cpu"))
    return float((found - direct).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=29_000)
    parser.add_argument("--captions", type=int, default=5, help="of each image")
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--embed", type=int, default=1024)
    parser.add_argument("--form", choices=["matrix", "embeddings"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--entries", type=int, default=20)
    parser.add_argument("--limit-mb", type=float, default=4000.0)
    parser.add_argument("--folder", type=Path, help="where the data go; by default a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        data, run, guide = (Path(temporary) / name for name in ("data", "teacher", "guide"))
        data.mkdir()
        make_data(data, options.images, options.regions, options.dim, options.captions)
        make_teacher(run, data, options.dim, options.embed)
        first = build(run, guide, options, until=0.5)
        second = build(run, guide, options, until=2.0)
        manifest = read_manifest(guide)
        split = load_pairs(str(data)).train
        error = largest_error(guide, run, split, options.entries)
        size = sum(path.stat().st_size for path in guide.rglob("*") if path.is_file())
    result = {
        "images": options.images,
        "captions": manifest.data.captions,
        "form": manifest.form,
        "guide_mb": round(size / 1e6, 1),
        "full_matrix_mb": round(options.images * manifest.data.captions * 4 / 1e6, 1),
        "until_killed": first,
        "resumed": second,
        "largest_error": error,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['images']:,} images × {result['captions']:,} captions, {manifest.form}, "
            f"{result['guide_mb']:,} MB (the matrix in full precision: "
            f"{result['full_matrix_mb']:,} MB)"
        )
        for name, part in {"killed at": first, "resumed to": second}.items():
            print(
                f"{name} {part['done']:.0%}: {part['seconds']} s, peak resident memory "
                f"{part['resident_mb_peak']} MB"
            )
        print(f"largest error of {options.entries}² entries: {error:.1e}")
    peak = max(first["resident_mb_peak"], second["resident_mb_peak"])
    return 0 if error < 2e-3 and peak < options.limit_mb else 1


if __name__ == "__main__":
    sys.exit(main())
