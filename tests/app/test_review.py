"""The audit as a place of work: decide on the page and over the API, reload, export."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest

import counterfoil.app.review
from counterfoil.app.application import create_app
from counterfoil.app.content import Audit, ServedModel
from counterfoil.audit.corrected import CORRECTED, DataSource
from counterfoil.audit.decisions import LOG, Decision, DecisionLog, Review, key_of
from counterfoil.audit.findings import Corrected, WrongWord, read_findings, to_jsonl
from counterfoil.audit.merge import merge_log
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.locks import locked_target
from counterfoil.data.images import open_image
from tests.app.conftest import LIMITS, finding, running
from tests.app.test_application_page import Page
from tests.conftest import thinned

HOSTILE = "<img src=x onerror=document.body.dataset.hacked=1> & “quotes”"
TEXTS = ["a red dog on a beach", HOSTILE, "two cows", "the red car of a man", "a red boat"]


@pytest.fixture
def report(pairs, tmp_path) -> Path:
    """An audit of a CSV of five captions of the test images."""
    data, folder = tmp_path / "data", tmp_path / "report"
    data.mkdir()
    folder.mkdir()
    rows = ["image,caption,note"]
    for place, text in enumerate(TEXTS):
        open_image(pairs.test.pixels[place]).save(data / f"{pairs.test.ids[place]}.png")
        rows.append(f'{pairs.test.ids[place]}.png,"{text}",{place}')
    (data / "captions.csv").write_text("\n".join([*rows, ""]), encoding="utf-8")
    findings = [
        finding(pairs.test.ids[place], text, "wrong-words").model_copy(
            update={
                "suspicion": 0.9 - place / 10,
                **({} if "red" in text else {"correction": None}),
            }
        )
        for place, text in enumerate(TEXTS)
    ]
    (folder / "findings.jsonl").write_text(to_jsonl(findings), encoding="utf-8")
    source = DataSource(str(data / "captions.csv"), None, {}).as_dict()
    (folder / "summary.json").write_text(json.dumps({"source": source, "notes": []}))
    return folder


@pytest.fixture
def service(content, report):
    """Starts a service of the report; each call is a new one."""

    @contextmanager
    def start():
        with running(replace(content, audit=Audit(report)), LIMITS) as client:
            yield client

    return start


def change(report: Path, place: int, text: str, suggestion: str) -> None:
    """Let a finding be about another caption, in which "red" is wrong."""
    findings = read_findings(report)
    start = text.index("red")
    word = WrongWord(
        word="red", span=(start, start + 3), effect=-0.1, usual=0.2, suggestions=("brown",)
    )
    fixed = Corrected(text=suggestion, before=0.1, after=0.4, changes=(("red", "brown"),))
    update = {"text": text, "wrong_words": (word,), "correction": fixed}
    findings[place] = findings[place].model_copy(update=update)
    (report / "findings.jsonl").write_text(to_jsonl(findings), encoding="utf-8")


def actions(report: Path) -> list[str | None]:
    findings = read_findings(report)
    review = Review.of(DecisionLog(report), findings)
    finals = [review.of_finding(one).final for one in findings]
    return [final and final.action for final in finals]


def stored(report: Path, *expected: str | None) -> None:
    assert actions(report) == list(expected)


def focused(browser) -> str:
    return browser.js(
        "document.activeElement.closest('.finding')?.querySelector('.caption').innerText"
    )


def left(browser, count: int) -> None:
    browser.wait(f"document.querySelector('.counted').innerText.includes('{count} left')")


def test_findings_are_decided_by_keys_and_survive_a_restart(browser, service, report) -> None:
    with service() as client:
        page = Page(browser, client)
        page.open("audit")
        left(browser, 5)
        assert "keep" in browser.text(".keys")
        browser.js("document.getElementById('reviewer').value = 'Ann'")
        browser.press("j")
        assert "beach" in focused(browser)
        browser.press("s")  # take the suggestion
        left(browser, 4)
        assert "<img src=x" in focused(browser)  # on to the next
        browser.press("d")
        left(browser, 3)
        browser.press("k")
        left(browser, 2)
        browser.press("e")
        browser.wait("document.activeElement.matches('.mending-text')")
        browser.write("a green car & <b>")
        browser.press("Enter")
        left(browser, 1)
        stored(report, "fix", "discard", "keep", "fix", None)
        browser.press("ArrowUp")
        assert "green" not in focused(browser)  # the caption as it is in the data
        assert browser.count(".finding.decided") == 4
        assert page.complaints() == []
    corrections = [one.decision.correction for one in DecisionLog(report).standings().values()]
    assert corrections == ["a brown dog on a beach", None, None, "a green car & <b>"]
    assert {one.decision.reviewer for one in DecisionLog(report).standings().values()} == {"Ann"}
    with service() as client:  # a new process of the service
        page = Page(browser, client)
        page.open("audit")
        left(browser, 1)
        assert browser.count(".finding") == 1
        page.open("audit", state="decided")
        assert browser.count(".finding") == 4
        assert "Fixed by Ann: a green car & <b>" in browser.text(".findings")
        page.open("audit", state="all")
        assert browser.count(".finding") == 5
        assert not browser.js("document.body.dataset.hacked")


def test_a_decision_is_undone_by_a_key(browser, service, report) -> None:
    with service() as client:
        Page(browser, client).open("audit")
        browser.press("j")
        browser.press("k")
        left(browser, 4)
        browser.press("d")
        left(browser, 3)
        browser.press("u")
        left(browser, 4)
        assert "<img" in focused(browser)
        browser.press("u")
        left(browser, 5)
        stored(report, None, None, None, None, None)
        browser.press("u")
        browser.wait("document.getElementById('status').textContent === 'Nothing to undo'")


@pytest.mark.slow
def test_a_decision_of_an_earlier_visit_is_undone(browser, service, report) -> None:
    with service() as client:
        page = Page(browser, client)
        page.open("audit")
        browser.press("j")
        for key, count in (("k", 4), ("d", 3), ("d", 2)):
            browser.press(key)
            left(browser, count)
        page.open("audit", state="decided")  # a new page: it remembers nothing
        browser.press("j")
        browser.press("j")
        browser.press("u")
        left(browser, 3)
        stored(report, "keep", None, "discard", None, None)
        assert "<img" in focused(browser)
        browser.click(".finding.decided [data-act=undo]")
        left(browser, 4)
        stored(report, None, None, "discard", None, None)
        browser.press("u")  # nothing was decided in this visit, and this finding is open
        browser.wait("document.getElementById('status').textContent === 'Nothing to undo'")
        page.open("audit", state="decided")
        browser.js("document.getElementById('reviewer').value = 'Bob'")
        browser.press("j")
        browser.press("u")
        browser.wait("document.querySelector('.finding .problem') !== null")
        assert "by anonymous" in browser.text(".finding .problem")
        stored(report, None, None, "discard", None, None)


@pytest.mark.slow
def test_the_focused_decision_is_undone_before_the_last(browser, service, report) -> None:
    with service() as client:
        Page(browser, client).open("audit")
        browser.press("j")
        browser.press("k")
        left(browser, 4)
        browser.press("d")
        left(browser, 3)
        browser.press("ArrowUp")
        browser.press("ArrowUp")
        browser.press("u")
        left(browser, 4)
        stored(report, None, "discard", None, None, None)
        browser.press("u")  # open now, so the last one
        left(browser, 5)


ALL_GAPS = "\n\r\t\u2028\x0b\x85"


@pytest.mark.parametrize(
    "gap", thinned([ALL_GAPS, "\n", " \r\n\t", "\u2028", "\x0b\x85"], ALL_GAPS)
)
def test_a_caption_of_several_lines_stays_in_words(browser, service, report, gap) -> None:
    change(report, 0, f"two red{gap}cows ", f"two brown{gap}cows ")
    change(report, 1, f"a red{gap}dog", f"a red {gap}dog")
    change(report, 2, f"a red{gap}cat", f"a brown{gap}cat")
    with service() as client:
        Page(browser, client).open("audit")
        browser.press("j")
        browser.press("s")
        left(browser, 4)
        browser.press("s")  # only white space differs
        left(browser, 3)
        browser.press("e")
        browser.wait("document.activeElement.matches('.mending-text')")
        assert browser.js("document.activeElement.value") == "a red cat"
        browser.press("Enter")
        left(browser, 2)
    standings = DecisionLog(report).standings().values()
    assert [one.decision.correction for one in standings] == ["two brown cows", None, None]
    stored(report, "fix", "keep", "keep", None, None)


@pytest.mark.slow
def test_words_behind_an_emoji_are_struck(browser, service, report) -> None:
    change(report, 0, "😀👩‍👩‍👧 the red car 🚗", "😀👩‍👩‍👧 the brown car 🚗")
    with service() as client:
        Page(browser, client).open("audit")
        assert browser.text(".finding s") == "red"
        assert browser.text(".finding .caption") == "😀👩‍👩‍👧 the red brown car 🚗"


@pytest.mark.parametrize("maker", thinned(["runs/other", "other", "elsewhere", 3], "runs/other", 3))
def test_findings_open_in_the_model_of_the_audit(browser, content, report, maker) -> None:
    (report / "summary.json").write_text(json.dumps({"run": maker, "notes": []}))
    models = (*content.models, ServedModel("other", content.models[0].model))
    with running(replace(content, models=models, audit=Audit(report)), LIMITS) as client:
        Page(browser, client).open("audit")
        links = browser.js("[...document.querySelectorAll('.finding a')].map(a => a.href)")
        named = isinstance(maker, str) and maker.endswith("other")
        assert links
        assert {"model=other" in link for link in links} == {named}
        browser.click(".finding .caption a")
        browser.wait("document.querySelector('.view.match[data-ready] #model') !== null")
        expected = "other" if named else content.models[0].name
        assert browser.js("document.getElementById('model').value") == expected


def test_editing_is_cancelled_by_escape_and_keys_in_a_field_are_letters(
    browser, service, report
) -> None:
    with service() as client:
        Page(browser, client).open("audit")
        browser.press("j")
        browser.press("e")
        browser.wait("document.activeElement.matches('.mending-text')")
        for key in "kd":
            browser.press(key)
        browser.press("Escape")
        browser.wait("document.activeElement.matches('.finding')")
        left(browser, 5)
        assert not (report / LOG).exists()


def test_buttons_work_by_touch_on_a_phone(browser, service, report) -> None:
    with service() as client:
        page = Page(browser, client)
        browser.size(390, 844, phone=True)
        page.open("audit")
        assert browser.js("document.documentElement.scrollWidth") <= 390
        heights = browser.js(
            "[...document.querySelectorAll('.choices button')].map(b => b.offsetHeight)"
        )
        assert min(heights) >= 44
        browser.click(".finding [data-act=discard]")
        left(browser, 4)
        browser.click(".finding:nth-child(2) [data-act=keep]")
        left(browser, 3)
        browser.click(".finding:nth-child(4) [data-act=edit]")
        browser.wait("document.activeElement.matches('.mending-text')")
        assert browser.js("document.documentElement.scrollWidth") <= 390
        browser.write("a car")
        browser.click(".editing .go")
        left(browser, 2)
        browser.size(1200, 900)
        stored(report, "discard", "keep", None, "fix", None)


def test_the_corrected_data_are_exported_from_the_page(browser, service, report) -> None:
    with service() as client:
        Page(browser, client).open("audit")
        for key in "jsd":
            browser.press(key)
            if key != "j":
                left(browser, 4 if key == "s" else 3)
        browser.click("#export")
        browser.wait("document.querySelectorAll('.exported a').length === 2")
        assert "Fixed: 1, discarded: 1, open and unchanged: 3" in browser.text(".exported")
        assert browser.js("document.querySelector('.exported a').download") == "captions.csv"
        text = client.get("/api/audit/corrected?file=captions.csv").body.decode()
        diff = client.get("/api/audit/corrected?file=changes.diff")
    assert "a brown dog on a beach" in text
    assert "<img" not in text
    assert len(text.splitlines()) == len(TEXTS)
    assert diff.body.startswith(b"--- a/captions.csv")
    assert diff.headers["content-disposition"].startswith("attachment")
    original = (report.parent / "data" / "captions.csv").read_text(encoding="utf-8")
    assert all(text in original for text in TEXTS)


def test_a_conflict_of_reviewers_is_open_until_somebody_decides(browser, service, report) -> None:
    findings = read_findings(report)
    with service() as client:
        key = client.get("/api/audit").json["findings"][0]["key"]
        body = {"key": key, "action": "keep", "reviewer": "Ann"}
        assert client.post("/api/audit/decisions", body).json["review"]["open"] == 4
        other = report.parent / "other.jsonl"
        own = DecisionLog(report).standings()
        bob = Decision.on(next(iter(own)), "discard", "Bob")
        other.write_text(bob.to_json(indent=None) + "\n")
        merge_log(DecisionLog(report), other, findings)
        Page(browser, client).open("audit")  # the service sees what another process merged
        left(browser, 5)
        assert "Conflict: Kept by Ann · Discarded by Bob" in browser.text(".findings")
        browser.press("j")
        browser.press("d")
        left(browser, 4)
    assert actions(report)[0] == "discard"


def test_the_next_page_of_open_findings_skips_none_while_some_are_decided(service, report) -> None:
    with service() as client:
        first = client.get("/api/audit?state=open&limit=2").json
        keys = [one["key"] for one in first["findings"]]
        for key in keys:
            client.post("/api/audit/decisions", {"key": key, "action": "keep"})
        query = urlencode({"state": "open", "limit": 2, "after": keys[-1]})
        second = client.get(f"/api/audit?{query}").json
        assert [one["text"] for one in second["findings"]] == TEXTS[2:4]
        assert (second["total"], second["left"]) == (3, 1)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"key": "0" * 32, "action": "keep"}, 404),
        ({"key": "KEY", "action": "undo"}, 409),
        ({"key": "KEY", "action": "fix"}, 422),
        ({"key": "KEY", "action": "keep", "correction": "x"}, 422),
        ({"key": "KEY", "action": "fix", "correction": "two\nlines"}, 422),
        ({"key": "KEY", "action": "fix", "correction": "x" * 5000}, 422),
        ({"key": "KEY", "action": "fix", "correction": "\ud800"}, 422),
        ({"key": "KEY", "action": "keep", "reviewer": "x" * 101}, 422),
        ({"key": "KEY", "action": "keep", "more": 1}, 422),
        ({"action": "keep"}, 422),
    ],
)
def test_requests_that_decide_nothing_are_refused(service, report, body, status) -> None:
    with service() as client:
        key = client.get("/api/audit").json["findings"][0]["key"]
        body = {name: key if value == "KEY" else value for name, value in body.items()}
        answer = client.post("/api/audit/decisions", body)
        assert answer.status == status, answer.body
        assert not (report / LOG).exists()


def test_one_reviewer_does_not_undo_the_decision_of_another(service, report) -> None:
    with service() as client:
        key = client.get("/api/audit").json["findings"][0]["key"]
        client.post("/api/audit/decisions", {"key": key, "action": "keep", "reviewer": "Ann"})
        undo = {"key": key, "action": "undo", "reviewer": "Bob"}
        answer = client.post("/api/audit/decisions", undo)
        assert answer.status == 409
        assert "Ann" in answer.json["detail"]
        assert client.post("/api/audit/decisions", {**undo, "reviewer": "Ann"}).status == 200
    assert actions(report)[0] is None


def test_undo_after_a_merge_leaves_the_decision_of_the_other(service, report, tmp_path) -> None:
    with service() as client:
        key = client.get("/api/audit").json["findings"][0]["key"]
        ann = {"key": key, "reviewer": "Ann"}
        client.post("/api/audit/decisions", {**ann, "action": "keep"})
        findings = read_findings(report)
        DecisionLog(tmp_path / "bob.jsonl").append(
            Decision.on(key_of(findings[0]), "discard", "Bob")
        )
        assert len(merge_log(DecisionLog(report), tmp_path / "bob.jsonl", findings).conflicts) == 1
        answer = client.post("/api/audit/decisions", {**ann, "action": "undo"}).json
        assert (answer["decision"]["reviewer"], answer["rivals"]) == ("Bob", [])
        for name, reason in (("Ann", "by Bob"), ("Bob", "not made here")):
            undo = {"key": key, "action": "undo", "reviewer": name}
            refused = client.post("/api/audit/decisions", undo)
            assert refused.status == 409
            assert reason in refused.json["detail"]
    assert actions(report)[0] == "discard"


@pytest.mark.parametrize("name", ["../findings.jsonl", "/etc/passwd", "findings.jsonl", ".lock"])
def test_only_files_of_an_export_can_be_downloaded(service, report, name) -> None:
    with service() as client:
        query = urlencode({"file": name})
        assert client.get(f"/api/audit/corrected?{query}").status == 404
        assert client.post("/api/audit/export", {}).status == 200
        assert client.get(f"/api/audit/corrected?{query}").status == 404
        (report / "corrected" / "link").symlink_to("/etc/passwd")
        assert client.get("/api/audit/corrected?file=link").status == 404


def test_data_that_are_gone_are_reported_and_other_sites_cannot_decide(service, report) -> None:
    with service() as client:
        key = client.get("/api/audit").json["findings"][0]["key"]
        body = json.dumps({"key": key, "action": "keep"}).encode()
        headers = {"Content-Type": "application/json", "Origin": "http://evil.example"}
        assert client.ask("POST", "/api/audit/decisions", body, headers).status == 403
        form = {"Content-Type": "text/plain"}
        assert client.ask("POST", "/api/audit/decisions", body, form).status == 422
        (report.parent / "data" / "captions.csv").unlink()
        answer = client.post("/api/audit/export", {})
        assert answer.status == 422
        assert "no such file" in answer.json["detail"]


@pytest.mark.parametrize("size", [3, 500_000])
def test_a_download_is_the_whole_file_that_was_opened_if_an_export_replaces_it(
    content, report, size
) -> None:
    file = report / CORRECTED / "captions.csv"
    old, new = b"o" * 400_000, b"n" * size
    write_atomically(file, old)
    received, sent = [], []

    async def receive():
        if received:  # the client stays
            await asyncio.Event().wait()
        received.append({"type": "http.request", "body": b"", "more_body": False})
        return received[0]

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            write_atomically(file, new)
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/audit/corrected",
        "query_string": b"file=captions.csv",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    served = replace(content, audit=Audit(report), close=lambda: None)
    asyncio.run(create_app(served)(scope, receive, send))
    headers = dict(sent[0]["headers"])
    assert sent[0]["status"] == 200
    assert headers[b"content-length"] == b"400000"
    assert headers[b"content-disposition"] == b'attachment; filename="captions.csv"'
    assert b"".join(message["body"] for message in sent[1:]) == old
    assert file.read_bytes() == new


def test_exports_at_the_same_time_wait_for_each_other(service, report, monkeypatch) -> None:
    export = counterfoil.app.review.export_corrected

    def slow_export(*arguments, **options):
        with locked_target(report / CORRECTED, "exporting there"):
            time.sleep(0.1)
            return export(*arguments, **options)

    monkeypatch.setattr(counterfoil.app.review, "export_corrected", slow_export)
    with service() as client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: client.post("/api/audit/export", {}), range(6)))
    assert [answer.status for answer in answers] == [200] * 6


def test_an_export_that_waits_too_long_is_to_be_tried_again(content, report, monkeypatch) -> None:
    export = counterfoil.app.review.export_corrected

    def slow_export(*arguments, **options):
        time.sleep(1.5)
        return export(*arguments, **options)

    monkeypatch.setattr(counterfoil.app.review, "export_corrected", slow_export)
    served, limits = replace(content, audit=Audit(report)), replace(LIMITS, timeout=0.2)
    with running(served, limits) as client, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: client.post("/api/audit/export", {}), range(2)))
    done, refused = sorted(answers, key=lambda answer: answer.status)
    assert (done.status, refused.status) == (200, 503)
    assert refused.headers["retry-after"] == "1"
    assert "another export" in refused.json["detail"]


def test_an_export_beside_one_of_another_process_is_to_be_tried_again(service, report) -> None:
    with service() as client:
        with locked_target(report / CORRECTED, "exporting there"):
            answer = client.post("/api/audit/export", {})
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "exporting there" in answer.json["detail"]
        assert client.post("/api/audit/export", {}).status == 200
