"""What MkDocs calls: pages that are generated, tutorials that are run, and llms.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import reference
import tutorials
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
CHANGED_LINKS = {"docs/": "", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Links of files of the root, which the site shows beside the pages of docs/."""

TABLES = re.compile(r"<!-- tables: (\w+) -->")
"""Where a paper's page lists the tables and figures that can be run."""

ZOO = "<!-- zoo -->"
"""Where a page shows the table of pretrained models."""

summaries: dict[str, str] = {}


def generated_pages() -> dict[str, str]:
    """Markdown by path: what no file in docs/ holds."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for old, new in CHANGED_LINKS.items():
        contributing = contributing.replace(f"]({old}", f"]({new}")
    return {"contributing.md": contributing, **reference.pages()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    config.nav = _expand(config.nav, sorted(files.src_uris))
    return files


def _expand(node: Any, paths: list[str]) -> Any:
    """The navigation with ``folder/*`` replaced by the pages of that folder and of those below."""
    if isinstance(node, list):
        return [_expand(item, paths) for item in node]
    if isinstance(node, dict):
        return {title: _expand(item, paths) for title, item in node.items()}
    return _pages_of(node[:-1], paths) if isinstance(node, str) and node.endswith("/*") else node


def _pages_of(folder: str, paths: list[str]) -> list[Any]:
    """Pages of a folder, its index first; a folder below is a section that is named after it."""
    inside = [path.removeprefix(folder) for path in paths if path.startswith(folder)]
    pages = sorted((path for path in inside if path.endswith(".md")), key=_place)
    sections = dict.fromkeys(path.split("/")[0] for path in pages if "/" in path)
    own: list[Any] = [folder + path for path in pages if "/" not in path]
    return own + [{name.capitalize(): _pages_of(f"{folder}{name}/", paths)} for name in sections]


def _place(path: str) -> str:
    return path.removesuffix(".md").removesuffix("index")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    summaries[page.file.src_uri] = _summary(markdown)
    markdown = TABLES.sub(lambda mark: reference.tables_of(mark[1]), markdown)
    if ZOO in markdown:
        markdown = markdown.replace(ZOO, reference.zoo_table())
    if page.file.src_uri.startswith("tutorials/") and config.extra["run_tutorials"]:
        return tutorials.with_output(markdown, page.file.src_uri)
    return markdown


def _summary(markdown: str) -> str:
    """The first sentence of a page's first paragraph, without markup."""
    blocks = re.sub(r"(?ms)^```.*?^```|<!--.*?-->", "", markdown).split("\n\n")
    prose = (" ".join(block.split()) for block in blocks)
    plain = next((text for text in prose if text and text[0] not in "#!|<:=*-"), "")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain).replace("**", "").replace("`", "")
    return re.split(r"(?<=[.?!])\s|:$", plain)[0]


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    config.extra["pages_in_order"] = nav.pages
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """llms.txt: every page with its link and one line about it."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    section = None
    for page in config.extra.pop("pages_in_order"):
        top = page.ancestors[-1].title if page.ancestors else None
        if top != section or len(lines) == 3:
            lines += ["", f"## {top or page.title}", ""]
            section = top
        about = summaries[page.file.src_uri]
        lines.append(f"- [{page.title}]({page.url}){': ' if about else ''}{about}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
