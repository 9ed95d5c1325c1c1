"""A view that is left before it is ready: none of its keys, timers and addresses remain."""

from __future__ import annotations

import json

import pytest

from tests.app.browser import Browser
from tests.app.test_application_page import Page, image, page
from tests.app.test_review import left, report, service

__all__ = ["image", "page", "report", "service"]

HOLD = """
(() => {
window.live = { keys: 0, timers: new Set() };
const { fetch, addEventListener, removeEventListener, setTimeout, clearTimeout } = window;
window.addEventListener = (kind, ...rest) => {
  live.keys += kind === "keydown";
  addEventListener(kind, ...rest);
};
window.removeEventListener = (kind, ...rest) => {
  live.keys -= kind === "keydown";
  removeEventListener(kind, ...rest);
};
window.setTimeout = (act, wait) => {
  const timer = setTimeout(act, wait);
  if (wait >= 1000) live.timers.add(timer);
  return timer;
};
window.clearTimeout = (timer) => {
  live.timers.delete(timer);
  clearTimeout(timer);
};
// The first answer of a path waits for release(), which resolves when the view has used it.
window.hold = (path) => {
  let open;
  let used;
  const gate = new Promise((done) => (open = done));
  const after = new Promise((done) => (used = done));
  let isFirst = true;
  window.asked = false;
  window.fetch = async (address, options) => {
    if (!isFirst || new URL(address, location).pathname !== path) return fetch(address, options);
    isFirst = false;
    window.asked = true;
    const answer = await fetch(address, options);
    await gate;
    const body = await answer.json();
    return { ok: answer.ok, status: answer.status, json: async () => (setTimeout(used, 50), body) };
  };
  window.release = () => (open(), after.then(() => true));
};
})()
"""


def leave_early(browser: Browser, path: str, first: str, second: str) -> None:
    """Go to one address and, before the answer it needs has come, on to another."""
    browser.js(HOLD)
    browser.js(f"hold({json.dumps(path)}); location.hash = {json.dumps(first)}; true")
    browser.wait("asked")
    browser.js(f"location.hash = {json.dumps(second)}; true")
    browser.wait("document.querySelector('#main > .view[data-ready]') !== null")
    browser.js("release()")


def test_keys_of_an_audit_that_was_left_early_are_gone(browser, service, report) -> None:
    with service() as client:
        Page(browser, client).open("runs")
        leave_early(browser, "/api/audit", "#/audit?state=all", "#/audit")
        assert browser.js("live.keys") == 1
        browser.press("j")
        browser.press("k")
        left(browser, 4)
        assert len((report / "decisions.jsonl").read_text().splitlines()) == 1
        browser.js("location.hash = '#/runs'; true")
        browser.wait("document.querySelector('.view.runs[data-ready]') !== null")
        assert browser.js("live.keys") == 0


@pytest.mark.slow
def test_keys_of_an_audit_that_failed_are_gone(browser, service) -> None:
    with service() as client:
        Page(browser, client).open("runs")
        browser.js(HOLD)
        browser.js(
            "(ask => window.fetch = (address, options) => address.startsWith('/api/audit')"
            " ? Promise.reject(new Error('broken')) : ask(address, options))(window.fetch);"
            "location.hash = '#/audit'; true"
        )
        browser.wait("document.querySelector('.view.audit .problem') !== null")
        assert browser.js("live.keys") == 0


@pytest.mark.slow
def test_runs_that_were_left_early_are_not_followed(page) -> None:
    browser = page.open("match")
    leave_early(browser, "/api/run", "#/runs", "#/")
    assert browser.js("live.timers.size") == 0
    browser.js("location.hash = '#/runs'; true")
    browser.wait("live.timers.size === 1")
    browser.js("location.hash = '#/'; true")
    browser.wait("live.timers.size === 0")


@pytest.mark.parametrize("path", ["/api/image", "/api/explain"])
def test_a_match_that_was_left_early_does_not_take_the_address(page, image, path) -> None:
    browser = page.open("runs")
    leave_early(browser, path, f"#/match?image={image}&text=a+cat", "#/?q=a+red+car")
    browser.wait("document.querySelectorAll('.ticket .score').length > 0")
    assert browser.js("location.hash") == "#/?q=a+red+car"


def test_the_last_of_many_addresses_is_shown(page) -> None:
    browser = page.open("runs")
    browser.js(
        "for (const one of ['audit', 'match', 'runs', 'audit']) location.hash = `#/${one}`; 1"
    )
    browser.wait("document.querySelector('.view.audit[data-ready] .finding') !== null")
    assert browser.count("#main > .view") == 1
