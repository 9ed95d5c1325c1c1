"""An audit that another process makes while the page is open."""

from __future__ import annotations

import shutil
from dataclasses import replace
from urllib.parse import urlencode

import pytest

from counterfoil.app.content import AwaitedAudit
from counterfoil.audit import audit_split, write_report
from counterfoil.training.run_folder import load_model
from tests.app.conftest import LIMITS, running
from tests.app.test_application_navigation import HOLD
from tests.app.test_application_page import Page
from tests.conftest import thinned


@pytest.fixture(scope="module")
def complete(run, pairs, tmp_path_factory):
    """A whole report, of images that the index does not have."""
    folder = tmp_path_factory.mktemp("awaited")
    split = pairs.train.select(range(12))
    audit = audit_split(load_model(run, "cpu"), split, threshold=0.05, examined=4)
    assert audit.listed
    write_report(folder, "awaited", [audit], {})
    return folder


def test_an_awaited_audit_is_served_as_soon_as_it_is_complete(content, complete, tmp_path) -> None:
    folder = tmp_path / "audit"
    awaited = replace(content, audit=None, awaited_audit=AwaitedAudit(folder))
    with running(awaited, LIMITS) as client:
        about = client.get("/api/about").json
        assert (about["audit"], about["audit_awaited"]) == (False, True)
        assert client.get("/api/audit").status == 404
        folder.mkdir()
        shutil.copy(complete / "findings.jsonl", folder)  # the report is not complete yet
        assert client.get("/api/about").json["audit_awaited"]
        shutil.copytree(complete, folder, dirs_exist_ok=True)
        about = client.get("/api/about").json
        assert (about["audit"], about["audit_awaited"]) == (True, False)
        first = client.get("/api/audit").json["findings"][0]
        name = {"image": first["image_names"][first["image"]]}
        assert client.get(f"/api/picture?{urlencode(name)}").status == 200


def test_why_an_awaited_audit_failed_is_said(content, tmp_path) -> None:
    awaited = AwaitedAudit(tmp_path)
    with running(replace(content, audit=None, awaited_audit=awaited), LIMITS) as client:
        awaited.problem = "the disk is full"
        about = client.get("/api/about").json
        assert (about["audit_awaited"], about["audit_problem"]) == (False, "the disk is full")
        (tmp_path / "findings.jsonl").write_text("{}\n")
        (tmp_path / "summary.json").write_text("{}")
        assert "findings.jsonl: line 1" in client.get("/api/about").json["audit_problem"]


def test_the_audit_tab_fills_itself(browser, content, complete, tmp_path) -> None:
    awaited = replace(content, audit=None, awaited_audit=AwaitedAudit(tmp_path))
    with running(awaited, LIMITS) as client:
        opened = Page(browser, client).open("audit")
        assert "is being made" in opened.text("[role=status].empty")
        assert opened.count(".finding") == 0
        shutil.copytree(complete, tmp_path, dirs_exist_ok=True)
        opened.wait("document.querySelectorAll('.finding').length > 0")
        assert "is being made" not in opened.text("main")


def test_keys_of_an_awaited_audit_end_with_its_view(browser, content, complete, tmp_path) -> None:
    awaited = replace(content, audit=None, awaited_audit=AwaitedAudit(tmp_path))
    with running(awaited, LIMITS) as client:
        opened = Page(browser, client).open("audit", state="all")
        opened.js(HOLD)
        shutil.copytree(complete, tmp_path, dirs_exist_ok=True)
        opened.wait("document.querySelectorAll('.view[data-ready] .finding').length > 0")
        opened.wait("live.keys === 1")
        opened.press("j")
        assert opened.js("document.activeElement.matches('.finding')")
        opened.js("location.hash = '#/runs'; true")
        opened.wait("document.querySelector('.view.runs[data-ready]') !== null")
        assert opened.js("live.keys") == 0


@pytest.mark.parametrize("broken", thinned(["problem", "findings"], "findings"))
def test_the_audit_tab_says_why_an_awaited_audit_failed(browser, content, tmp_path, broken) -> None:
    awaited = AwaitedAudit(tmp_path)
    with running(replace(content, audit=None, awaited_audit=awaited), LIMITS) as client:
        opened = Page(browser, client).open("audit")
        assert "is being made" in opened.text("main")
        if broken == "problem":
            awaited.problem = "the disk is full"
        else:
            (tmp_path / "findings.jsonl").write_text("{}\n")
            (tmp_path / "summary.json").write_text("{}")
        opened.wait("document.querySelector('.view.audit .problem') !== null")
        expected = "the disk is full" if broken == "problem" else "findings.jsonl: line 1"
        assert expected in opened.text(".problem")
        assert "is being made" not in opened.text("main")
