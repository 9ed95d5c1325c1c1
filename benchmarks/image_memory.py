"""Peak memory of decoding an image at the limits of `counterfoil.core.storage.reading`.

One process for each image.

    python benchmarks/image_memory.py
    python benchmarks/image_memory.py --pixels 1000000

Images are of one colour with a few noisy rows: what a decoder allocates depends on the size alone.
``--pixels`` lowers all limits, for a quick look. The first row is a process that decodes an image
of one pixel: imports and the interpreter, which every other row includes.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from math import isqrt
from pathlib import Path

import numpy as np
from PIL import Image

from counterfoil.core.storage.reading import ANIMATION_PIXELS, IMAGE_PIXELS, JPEG_PIXELS
from counterfoil.data.images import FileImage, open_image
from counterfoil.evaluation.report import markdown_table

CASES = {
    "one pixel": ("png", "RGB", 1, {}),
    "JPEG, one scan": ("jpg", "RGB", JPEG_PIXELS, {}),
    "JPEG, progressive": ("jpg", "RGB", IMAGE_PIXELS, {"progressive": True}),
    "PNG": ("png", "RGB", IMAGE_PIXELS, {"compress_level": 1}),
    "PNG, transparent": ("png", "RGBA", IMAGE_PIXELS, {"compress_level": 1}),
    "PNG, 16 bits": ("png", "I;16", IMAGE_PIXELS, {"compress_level": 1}),
    "TIFF": ("tif", "RGB", IMAGE_PIXELS, {"compression": "tiff_lzw"}),
    "WebP": ("webp", "RGB", ANIMATION_PIXELS, {"quality": 50, "method": 0}),
}


def write(case: str, pixels: int, folder: Path) -> Path:
    """Write an image of about ``pixels`` pixels; its path."""
    ending, mode, _, options = CASES[case]
    side = max(1, isqrt(pixels))
    image = Image.new(mode, (side, side))
    rows = min(side, 16)
    noise = np.random.default_rng(0).integers(0, 255, (rows, side, 3), dtype=np.uint8)
    if mode != "I;16":
        image.paste(Image.fromarray(noise).convert(mode), (0, 0))
    path = folder / f"image.{ending}"
    Image.MAX_IMAGE_PIXELS = None
    image.save(path, **options)
    return path


def in_a_process(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pixels", type=int, default=JPEG_PIXELS, help="largest size of an image")
    parser.add_argument("--write", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--decode", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        case, folder = given.write
        print(write(case, min(given.pixels, CASES[case][2]), Path(folder)))
        return
    if given.decode:
        Image.MAX_IMAGE_PIXELS = None  # the limits are ours
        width, height = open_image(FileImage(given.decode)).size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{width} × {height}|{peak / 1e9:.2f}")
        return
    rows = []
    for case, (_, _, limit, _) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            pixels = min(given.pixels, limit)
            path = in_a_process("--pixels", str(pixels), "--write", case, folder)
            size, peak = in_a_process("--decode", path).split("|")
        rows.append((case, f"{pixels / 1e6:,.0f}", size, peak))
    print("\n".join(markdown_table([("image", "million pixels", "decoded as", "peak GB"), *rows])))


if __name__ == "__main__":
    main()
