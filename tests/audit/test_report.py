"""The page and the files of an audit: whole, safe, and usable."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from PIL import Image

from counterfoil.audit.decisions import DecisionLog, Review
from counterfoil.audit.findings import (
    Corrected,
    Finding,
    OtherCaption,
    OtherImage,
    Reason,
    Summary,
    WrongWord,
    to_csv,
    to_jsonl,
    to_summary,
)
from counterfoil.audit.merge import merge_log
from counterfoil.audit.report import render, write_report
from counterfoil.data.formats.text_files import read_rows
from counterfoil.data.images import FileImage, MissingImage
from counterfoil.data.pairs import ProblemLog, Split

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</article></body><h1>gone",
    "<!-- never closed",
    "]]></style><style>*{display:none}",
    "{title} {script} %s",
    "&lt;b&gt; &amp; <b>",
    "a\x00b\x1bc",
    "\u202ebackwards \u2066isolated",
    '=HYPERLINK("http://x")',
]


def finding(text: str = "a red dog", number: int = 0, **changes) -> Finding:
    values = {
        "kind": "mismatch",
        "split": "test",
        "image": f"image-{number}",
        "caption": 0,
        "text": text,
        "suspicion": 0.9 - 0.1 * number,
        "score": 0.1 * number,
        "quantile": 0.01,
        "rank": 3 + number,
        "compared": 10,
        "margin": -0.2,
        "reasons": (Reason(sign="low-score", strength=0.9, text=f"because of {text}"),),
        "wrong_words": (),
        "words_examined": True,
        "better_image": OtherImage(image="image-1", score=0.7),
        "better_caption": OtherCaption(text=text, image="image-1", score=0.6),
        "near_duplicate": None,
        "near_duplicate_images": 0,
    }
    return Finding(**{**values, **changes})


def summary(**changes) -> Summary:
    values = {
        "split": "test",
        "images": 10,
        "captions": 50,
        "threshold": 0.5,
        "suspicious": 2,
        "false_negatives": 0,
        "false_negative_images": 0,
        "share": 0.04,
        "signs": {"low-score": 2, "other-image": 0, "wrong-words": 0},
        "words_examined": 50,
        "word_method": "parts",
        "score_median": 0.5,
        "recall_at_1": 0.6,
        "skipped_images": 1,
        "skipped_captions": 5,
        "unknown_captions": 0,
        "unknown_words": 0,
        "skipped": ("image 7: <b>broken</b>",),
        "notes": (),
    }
    return Summary(**{**values, **changes})


class Tags(HTMLParser):
    """Which tags and attributes a page has, and whether every tag is closed."""

    VOID = ("meta", "input", "img", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


def page_of(findings, splits=None, **options) -> str:
    return render("photos, read by naaf", [summary()], findings, splits or {}, **options)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_caption_is_never_markup(text) -> None:
    word = WrongWord(word=text, span=(0, len(text)), effect=-0.1, usual=0.2, suggestions=(text,))
    hostile = finding(
        text,
        image=text,
        split=text,
        wrong_words=(word,),
        near_duplicate=OtherCaption(text=text, image=text, score=0.9),
        correction=Corrected(text=text, before=0.1, after=0.2, changes=((text, text),)),
    )
    plain = Tags(page_of([finding("harmless", wrong_words=(word,))]))
    tags = Tags(page_of([hostile], notes=[text]))
    assert not tags.open
    names = [tag for tag, _ in tags.seen]
    assert names.count("script") == names.count("style") == 1
    assert set(names) <= {tag for tag, _ in plain.seen} | {"ins", "small", "p"}
    assert not any(key.startswith("on") for _, attributes in tags.seen for key in attributes)
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)
    assert shown in tags.text


def test_only_the_pages_own_script_may_run_and_nothing_is_fetched() -> None:
    page = page_of([finding()])
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for t, a in Tags(page).seen if t == "meta" and "http-equiv" in a)
    assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "http:" not in page
    assert "https:" not in page


def test_the_page_has_what_a_reader_needs() -> None:
    word = WrongWord(word="red", span=(2, 5), effect=-0.1, usual=0.2, suggestions=("blue", "pink"))
    fixed = Corrected(text="a blue dog", before=0.1, after=0.8, changes=(("red", "blue"),))
    page = page_of([finding(wrong_words=(word,), correction=fixed)], notes=["a note"])
    assert re.search(r"a <mark[^>]*>red</mark> dog", page)
    for expected in (
        "a blue dog",
        "blue, pink",
        "rank 3 of 10",
        "a note",
        "Left out: image 7: &lt;b&gt;broken",
        "prefers-color-scheme: dark",
        "image-1, score 0.700",
        "0.100 → 0.800",
    ):
        assert expected in page
    labels = [a for t, a in Tags(page).seen if t == "input" and a["type"] == "checkbox"]
    assert [a["value"] for a in labels] == ["low-score"]


def test_the_tile_of_suspicious_captions_names_their_threshold() -> None:
    def tiles(*thresholds: float) -> str:
        return render("photos", [summary(threshold=one) for one in thresholds], [], {})

    assert "<dt>suspicious (suspicion ≥ 0.5)</dt><dd>2</dd>" in tiles(0.5)
    assert "<dt>suspicious (suspicion ≥ 0.302)</dt><dd>4</dd>" in tiles(0.30249, 0.30249)
    assert "<dt>suspicious (suspicion ≥ 0.3 or 0.7)</dt><dd>4</dd>" in tiles(0.7, 0.3)
    assert "(suspicion ≥ 0.9995)" in tiles(0.9995)
    assert "(suspicion ≥ 1)" in tiles(1.0)


def test_nothing_found_is_said_only_of_nothing() -> None:
    findings = [finding(number=0), finding(number=1, kind="false-negative")]
    for most, shown in ((0, 0), (9, 1)):
        page = page_of(findings, most=most)
        assert page.count("Nothing found") == 0
        assert page.count("None is shown here; findings.jsonl has all.") == 2 * (1 - shown)
    assert page_of([]).count("Nothing found") == 2


def test_pictures_are_in_the_page_where_they_can_be_read(tmp_path) -> None:
    Image.new("RGB", (400, 300), "red").save(tmp_path / "a.png")
    pixels = [FileImage(tmp_path / "a.png"), MissingImage("b.png")]
    split = Split("test", ["image-0", "image-1"], [["x"], ["y"]], pixels)
    page = page_of([finding(number=0)], {"test": split})
    assert page.count("data:image/jpeg;base64,") == 1
    assert "image-1 (unreadable)" in page
    bare = Split("test", ["image-0", "image-1"], [["x"], ["y"]])
    assert "data:image" not in page_of([finding(number=0)], {"test": bare})


def test_a_long_list_is_cut_and_says_so() -> None:
    alike = [finding(number=n, kind="false-negative") for n in range(4)]
    wrong = [finding(number=n) for n in range(8)]
    page = page_of(wrong + alike, most=5)
    assert page.count("<article") == 5
    assert page.count('data-kind="false-negative"') == 1
    assert "4 of 8 listed suspicious captions and 4 of 4 near-duplicates" in page
    assert "Nothing found" in page_of([])


def test_near_duplicates_have_a_section_of_their_own_and_identical_captions_share_a_card() -> None:
    near = OtherCaption(text="a dog", image="image-9", score=1.0)
    alike = [
        finding("a dog", number, kind="false-negative", near_duplicate=near) for number in range(3)
    ]
    page = page_of([finding("a cow", 5), *alike])
    suspicious, _, rest = page.partition('<section id="near-duplicates">')
    assert suspicious.count("<article") == 1
    assert 'data-kind="mismatch"' in suspicious
    assert rest.count("<article") == 1
    assert "×3" in rest
    assert all(f"image-{number}" in rest for number in range(3))
    assert "Near-duplicates (3)" in suspicious


def test_near_duplicates_stay_in_their_section_whatever_the_threshold() -> None:
    """A low threshold lists them as suspicious, too, which takes nothing from their section."""
    near = OtherCaption(text="a cat", image="image-9", score=1.0)
    sections = []
    for kind in ("false-negative", "mismatch"):
        page = page_of([finding("a dog", 0, kind=kind, near_duplicate=near)])
        sections.append(page.partition('<section id="near-duplicates">')[2])
        assert "Near-duplicates (1)" in page
    assert all('<article class="finding' in section for section in sections)


def test_an_image_that_has_a_near_duplicate_twice_is_pictured_once() -> None:
    near = OtherCaption(text="a dog", image="image-9", score=1.0)
    place = {"kind": "false-negative", "near_duplicate": near}
    findings = [finding("a dog", k // 2, caption=k % 2, **place) for k in range(4)]
    rest = page_of(findings).partition('<section id="near-duplicates">')[2]
    assert "×4" in rest
    assert rest.count("<small>image-1</small>") == 1
    assert "<small>image-0</small>" not in rest


def test_files_for_programs_hold_every_finding() -> None:
    result = [finding(text, n) for n, text in enumerate(HOSTILE)]
    lines = [json.loads(line) for line in to_jsonl(result).splitlines()]
    assert [line["text"] for line in lines] == HOSTILE
    assert [Finding.from_dict(line) for line in lines] == result
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert [row["text"] for row in rows[:-1]] == HOSTILE[:-1]
    assert rows[-1]["text"] == f"'{HOSTILE[-1]}"
    assert rows[0]["margin"] == "-0.2"
    assert rows[0]["reasons"] == "low-score"
    told = json.loads(to_summary([summary(), summary(suspicious=4)], {"model": "naaf"}))
    assert (told["suspicious"], told["captions"], told["share"]) == (6, 100, 0.06)
    assert told["skipped_images"] == 2


def test_a_spreadsheet_and_this_library_read_the_table(tmp_path) -> None:
    """Excel takes a CSV without a byte order mark for the code page of the system."""
    texts = ["ein Hündchen läuft", "犬が走る"]
    audit = SimpleNamespace(
        findings=[finding(text, number) for number, text in enumerate(texts)],
        summary=summary(),
        split=Split("test", ["image-0", "image-1"], [[text] for text in texts]),
        threshold=0.5,
        listed=2,
    )
    write_report(tmp_path, "photos", [audit], {})
    table = tmp_path / "findings.csv"
    assert table.read_bytes().startswith(b"\xef\xbb\xbfkind,")
    log = ProblemLog()
    rows = [row for _, row in read_rows(table, log)]
    assert [row["text"] for row in rows] == texts
    assert {row["kind"] for row in rows} == {"mismatch"}
    assert not log.problems


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = """<script>
const state = () => [...document.querySelectorAll("section:not([hidden]) .finding")]
  .filter((c) => !c.hidden).map((c) => c.dataset.image.slice(6)).join("");
const set = (name, value) => { const e = document.querySelector(name);
  if (e.type === "checkbox") e.checked = value; else e.value = value;
  e.dispatchEvent(new Event("input")); return state(); };
const tab = (name) => {
  document.querySelector(`.tabs [data-section=${name}]`).click(); return state(); };
const key = (name) => { document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}));
  const card = document.activeElement.closest(".finding");
  return card ? card.dataset.image.slice(6) : document.activeElement.id; };
const log = [state(), set(".chip input[value=other-image]", true),
  set(".chip input[value=other-image]", false), set("#order", "score"), set("#order", "rank"),
  set("#search", "CAT"), set("#search", ""), tab("near-duplicates"), tab("suspicious"),
  key("j"), key("j"), key("ArrowUp"), key("/"), document.querySelector("#shown").textContent];
document.body.dataset.log = log.join("|");
</script>"""


def in_browser(page: str, folder) -> str:
    (folder / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'user'}"]
    address = (folder / "page.html").as_uri()
    done = subprocess.run(
        [BROWSER, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=60
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_in_a_browser_it_sorts_filters_and_obeys_the_keyboard(tmp_path) -> None:
    other = Reason(sign="other-image", strength=0.9, text="x")
    result = [
        finding("a dog", 0),
        finding("a cat", 1, reasons=(other,)),
        finding("a cow", 2, kind="false-negative"),
        finding("<script>document.body.dataset.hacked = 1</script>", 3),
    ]
    page = page_of(result)
    shown = in_browser(page, tmp_path)
    assert "3 of 3 findings shown" in shown  # its script is let through by its own policy
    assert "data-hacked" not in shown
    assert re.search(r'class="tools" role="search">', shown)
    blocked = in_browser(page.replace("</body>", DRIVER + "</body>"), tmp_path)
    assert "data-log" not in blocked  # anybody else's is not
    free = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", DRIVER + "</body>")
    log = re.search(r'data-log="([^"]*)"', in_browser(free, tmp_path)).group(1).split("|")
    assert log == [
        "013", "1", "013", "013", "310", "1", "310", "2", "310",
        "3", "1", "3", "search", "3 of 3 findings shown",
    ]  # fmt: skip


REVIEW = """<script>
const press = (name) => { document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}));
  return document.querySelector("#progress").textContent; };
const log = [];
document.querySelector("#reviewer").value = "Ann";
for (const name of ["j", "s", "d", "k", "u"]) log.push(press(name));
press("e");
document.activeElement.value = "a <b>bull</b>";
press("Enter");
document.querySelector("#state").value = "decided";
document.querySelector("#state").dispatchEvent(new Event("input"));
log.push(document.querySelector("#shown").textContent);
let lines = "";
window.Blob = function (parts) { lines = parts.join(""); };
URL.createObjectURL = () => "#saved";
document.querySelector("#download").click();
document.body.dataset.lines = lines;
document.body.dataset.log = log.join("|");
document.body.dataset.again = Object.keys(load()).length;
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_decisions_of_the_page_can_be_merged(tmp_path) -> None:
    fixed = Corrected(text="a blue dog", before=0.1, after=0.8, changes=(("red", "blue"),))
    findings = [
        finding("a red dog", 0, correction=fixed),
        finding('<b id="x"> & "quotes"\t', 1),
        finding("a cow", 2),
        finding("a cat", 3),
    ]
    page = page_of(findings)
    free = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", REVIEW + "</body>")
    body = dict(Tags(in_browser(free, tmp_path)).seen)["body"]
    assert body["data-log"].split("|") == [
        "0 of 4 decided, 4 left", "1 of 4 decided, 3 left", "2 of 4 decided, 2 left",
        "3 of 4 decided, 1 left", "2 of 4 decided, 2 left", "3 of 4 findings shown",
    ]  # fmt: skip
    assert body["data-again"] == "3"  # stored for the next visit
    (tmp_path / "decisions.jsonl").write_text(body["data-lines"], encoding="utf-8")
    (tmp_path / "mine").mkdir()
    log = DecisionLog(tmp_path / "mine")
    merged = merge_log(log, tmp_path / "decisions.jsonl", findings)
    assert (merged.added, merged.damaged, merged.unknown) == (3, 0, 0)
    review = Review.of(log, findings)
    outcomes = [final and final.outcome for final in (review.of_finding(f).final for f in findings)]
    assert outcomes == [("fix", "a blue dog"), ("discard", None), ("fix", "a <b>bull</b>"), None]
    assert review.of_finding(findings[0]).decision.reviewer == "Ann"


SEVERAL_LINES = """<script>
const press = (name) => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}));
const made = () => cards.map((card) => decisions[card.dataset.key])
  .map((one) => one ? `${one.action}:${one.correction ?? ""}` : "open").join("|");
const log = [];
for (const name of ["j", "s", "s", "e"]) press(name);
log.push(document.activeElement.value);
press("Enter");
log.push(made());
past.length = 0;  // as on the next visit
cards[1].focus();
press("u");
log.push(made());
chosenState.value = "decided";
update();
press("j");
press("u");
log.push(made(), document.activeElement.closest(".finding").dataset.image);
cards[2].querySelector(".decide button:last-child").click();
log.push(made());
document.body.dataset.log = JSON.stringify(log);
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
@pytest.mark.parametrize("gap", ["\n", "\r\n \t", "\u2029", "\x0b"])
def test_decisions_of_the_page_are_one_line_and_undone_on_the_next_visit(tmp_path, gap) -> None:
    def suggested(text: str) -> Corrected:
        return Corrected(text=text, before=0.1, after=0.8, changes=(("red", "blue"),))

    findings = [
        finding(f"a red{gap}dog ", 0, correction=suggested(f"a blue{gap}dog ")),
        finding(f"a red{gap}cow", 1, correction=suggested(f"a red {gap}cow")),
        finding(f"two{gap}cats ", 2),
    ]
    page = re.sub(r"<meta http-equiv[^>]*>", "", page_of(findings))
    free = page.replace("</body>", SEVERAL_LINES + "</body>")
    body = dict(Tags(in_browser(free, tmp_path)).seen)["body"]
    assert json.loads(body["data-log"]) == [
        "two cats",
        "fix:a blue dog|keep:|keep:",
        "fix:a blue dog|open|keep:",
        "open|open|keep:",
        "image-2",
        "open|open|open",
    ]
