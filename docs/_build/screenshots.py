"""Pictures of every view of a running page, in Chromium: wide and phone, light and dark.

    counterfoil serve RUN --audit AUDIT --runs RUNS &
    python docs/_build/screenshots.py http://127.0.0.1:8000 --out shots
    python docs/_build/screenshots.py http://127.0.0.1:8000 --docs \\     # those of docs/images
      --image scene-test-000497 --text "a kid in checked clothes is holding a big black balloon" \\
      --word black

With ``--photo FILE``, the match view shows this photo. Without ``--text``, it shows the sentence
that is searched for, ``--sentence``.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.app.browser import Browser, find_browser  # noqa: E402

SIZES = {"wide": (1280, 860, False), "phone": (390, 844, True)}
SCHEMES = ("light", "dark")
FREQUENT, DISTANT, QUALITY = 192, 64, 82
MOST_BYTES = 120_000

# file of docs/images: view, size, scheme
SHOWN = {
    "page-search.png": ("search", "wide", "light"),
    "page-match.png": ("match", "wide", "light"),
    "page-audit.png": ("audit", "wide", "light"),
    "page-runs-dark.png": ("runs", "wide", "dark"),
    "page-phone.png": ("match", "phone", "light"),
}
PHOTO_SHOWN = {
    "page-photo.jpg": ("match", "wide", "light"),
}


class Page:
    """The views of a running page by name, and the browser that opens them."""

    def __init__(self, address: str, browser: Browser, args: argparse.Namespace) -> None:
        self.address, self.browser = address.rstrip("/"), browser
        self.facts = self.ask("/api/about")
        self.sentence = args.sentence or next(iter(self.facts["examples"]), "a dog on a beach")
        self.word = args.word
        image = self.send(args.photo) if args.photo else args.image or self.find_image()
        self.views = {
            "home": "#/",
            "search": f"#/search?{urlencode({'q': self.sentence})}",
            "start": "#/match",
            "audit": "#/audit",
            "runs": "#/runs",
            "api": "docs",
        }
        if image is not None:
            pair = {"image": image, "text": args.text or self.sentence}
            self.views["match"] = f"#/match?{urlencode(pair)}"
            self.views["sentences"] = f"#/search?{urlencode({'image': image})}"

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data, headers)  # noqa: S310
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return json.load(answer)

    def find_image(self) -> str | None:
        if not self.facts["images"]:
            return None
        return str(self.ask("/api/search", {"text": self.sentence, "k": 1})["hits"][0]["image"])

    def send(self, photo: Path) -> str:
        """Upload through the page itself."""
        self.browser.go(f"{self.address}/#/match")
        self.browser.choose_file("#file", photo)
        self.browser.wait("location.hash.includes('image=')")
        return str(self.browser.js("new URLSearchParams(location.hash.split('?')[1]).get('image')"))

    def shoot(self, view: str, size: str, scheme: str, path: Path) -> None:
        width, height, phone = SIZES[size]
        self.browser.size(width, height, phone)
        self.browser.colors(scheme)
        self.browser.mouse("mouseMoved", 1, 1)
        self.browser.go(f"{self.address}/{self.views[view]}")
        self.browser.wait("[...document.images].every((one) => one.complete || one.loading)")
        if view == "match":
            self.browser.wait("document.querySelectorAll('.word').length > 0")
            self.browser.wait("!document.querySelector('.mending.expected:empty')")  # a correction
            self.choose_word()
        overflow = self.browser.js("document.documentElement.scrollWidth - innerWidth")
        if overflow > 0:
            print(f"{view} {size}: wider than the window by {overflow} pixels")
        self.browser.js("window.scrollTo(0, 0)")
        self.browser.picture(path)
        small(path)

    def choose_word(self) -> None:
        place = self.browser.js(
            "[...document.querySelectorAll('.word .letters')].findIndex((one) => "
            f"one.textContent.toLowerCase() === {json.dumps(self.word)})"
        )
        if place >= 0:
            self.browser.js(f"document.querySelector('.word[data-place=\"{place}\"]').click()")


def small(path: Path) -> None:
    """Write a picture again: a photo as JPEG, others with 256 colors if they are large."""
    picture = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    if path.suffix == ".jpg":
        picture.save(path, quality=QUALITY, optimize=True)
        return
    picture.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        few = picture.quantize(palette=palette(picture), dither=Image.Dither.FLOYDSTEINBERG)
        few.save(path, optimize=True)


def palette(picture: Image.Image) -> Image.Image:
    """Frequent colors for smooth skies, and distant ones, which those would swallow."""
    frequent = picture.quantize(FREQUENT).getpalette()[: 3 * FREQUENT]
    distant = picture.quantize(DISTANT, method=Image.Quantize.MAXCOVERAGE).getpalette()
    colors = Image.new("P", (1, 1))
    colors.putpalette(frequent + distant[: 3 * DISTANT])
    return colors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--out", type=Path, help="folder for a picture of every view")
    parser.add_argument("--docs", action="store_true", help="write the pictures of docs/images")
    parser.add_argument("--photo", type=Path, help="photo of the match view")
    parser.add_argument("--image", help="image of the match view; default: the best for --sentence")
    parser.add_argument("--sentence", help="sentence to search and match")
    parser.add_argument("--text", help="another sentence for the match view")
    parser.add_argument("--word", default="", help="word of the sentence that is chosen")
    args = parser.parse_args()
    program = find_browser()
    if program is None:
        parser.error("no Chromium on this machine")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, Path(profile))
        try:
            page = Page(args.address, browser, args)
            if args.docs:
                shown = PHOTO_SHOWN if args.photo else SHOWN
                for name, wanted in shown.items():
                    page.shoot(*wanted, ROOT / "docs" / "images" / name)
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                for view in page.views:
                    for size in SIZES:
                        for scheme in SCHEMES:
                            page.shoot(view, size, scheme, args.out / f"{view}-{size}-{scheme}.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
