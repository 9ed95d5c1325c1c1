"""The documentation: what is generated covers the code, pages are in the navigation, tutorials run.

`make links` builds the whole site, with warnings as errors: links, anchors and docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from counterfoil.core.config import RunConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_build"))
reference = importlib.import_module("reference")
tutorials = importlib.import_module("tutorials")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def test_every_command_is_in_the_reference_with_all_its_options(pages) -> None:
    text = pages["reference/cli.md"]
    result = dict(reference.commands())
    assert {"counterfoil train", "counterfoil data inspect", "counterfoil index add"} <= set(result)
    for name, command in result.items():
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert (command.help or "").split(".")[0].split("\n")[0] in section, name
        for parameter in command.params:
            shown = parameter.opts[0] if "-" in parameter.opts[0] else parameter.metavar
            assert parameter.hidden or (shown or parameter.opts[0]) in section, name


def keys(section: type, prefix: str = "") -> list[str]:
    result = []
    for name, field in section.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        result += keys(field.annotation, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return result


def test_every_key_of_a_recipe_is_in_the_reference(pages) -> None:
    text = pages["reference/configuration.md"]
    assert "train.epochs" in keys(RunConfig)
    for key in keys(RunConfig):
        assert f"| `{key}` |" in text, key


def test_every_registered_name_is_in_the_reference(pages) -> None:
    text = pages["reference/parts.md"]
    for title, (package, name, _) in reference.REGISTRIES.items():
        section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for entry in getattr(importlib.import_module(f"counterfoil.{package}"), name):
            assert f"| `{entry}` |" in section, entry


def test_every_public_name_is_documented(pages) -> None:
    shown = set(re.findall(r"^::: (\S+)$", "\n".join(pages.values()), re.MULTILINE))
    for package in reference.PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", []):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                assert f"{value.__module__}.{value.__qualname__}" in shown, f"{package}.{name}"
    assert {path for paths in reference.FURTHER.values() for path in paths} <= shown


def test_the_reference_names_no_folder_of_this_machine(pages) -> None:
    assert not [path for path, text in pages.items() if str(Path.home()) in text]


def test_help_becomes_markdown_without_markup_of_the_terminal() -> None:
    text = reference._help("Train it.\n\n[bold]Examples[/]\n\n  counterfoil train a [b]\n  two")
    assert text == "Train it.\n\nExamples\n\n```sh\ncounterfoil train a [b]\ntwo\n```"


def test_a_tutorial_shows_what_its_blocks_print() -> None:
    page = (
        '```python title="mine.py"\nVALUE = 20\n```\n\n'
        "```python\nimport mine\nx = mine.VALUE\n```\n\n"
        "```python\nprint(x + 1)\n```\n\n"
        "```sh\nls *.py\n```\n\n```yaml\na: 1\n```\n"
    )
    shown = tutorials.with_output(page, "a page")
    assert re.findall(r"```text\n(.*?)\n```", shown) == ["21", "mine.py"]


@pytest.mark.parametrize("block", ["```python\n1 / 0\n```\n", "```sh\nfalse | cat\n```\n"])
def test_a_tutorial_that_fails_names_its_page(block) -> None:
    with pytest.raises(tutorials.TutorialError, match=r"some\.md: a block failed"):
        tutorials.with_output(block, "some.md")


def test_every_tutorial_says_that_it_was_run() -> None:
    result = sorted(DOCS.glob("tutorials/*.md"))
    assert result
    for page in result:
        text = page.read_text(encoding="utf-8")
        assert "ran when the site was built" in text, page
        assert "```python" in text, page


@pytest.mark.slow
def test_the_site_builds_with_its_tutorials_and_loads_nothing_from_elsewhere(tmp_path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "RUN_TUTORIALS": "true", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    html = sorted(site.rglob("*.html"))
    for page in html:
        loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="(\w+:)?//', page.read_text())
        assert not loaded, page
    listed = re.findall(r"\]\(([^)]+\.html)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    assert {site / path for path in listed} == {page for page in html if page.name != "404.html"}
    assert (site / "search" / "search_index.js").is_file()  # search without a server


def test_every_number_of_the_advice_stands_on_a_page_that_it_links_to() -> None:
    text = (DOCS / "choosing.md").read_text(encoding="utf-8")
    number = re.compile(r"(?<![\d.])\d+\.\d+")
    checked = 0
    for part in re.split(r"\n(?=[-|\d\n])", text):  # a row, an item or a paragraph
        linked = re.findall(r"\]\(([\w/.-]+\.md)", part)
        pages = "".join((DOCS / page).read_text(encoding="utf-8") for page in linked)
        missing = set(number.findall(part)) - set(number.findall(pages))
        missing -= {"0.9"} if "--threshold" in part else set()
        assert not missing, part
        checked += len(number.findall(part))
    assert checked > 40
