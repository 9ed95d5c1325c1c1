"""Recipes of the package by name, and a YAML parser with limits.

``scenes/naaf`` is ``recipes/scenes/naaf.yaml``. A text that ends in ``.yaml`` is a path, any other
a name. Files that begin with ``_`` are only extended by others and are not listed.
"""

from __future__ import annotations

import difflib
import re
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from counterfoil.core.printable import printable

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
SUFFIXES = (".yaml", ".yml")


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of all recipes of the package, sorted, including those that are only extended."""
    files = FOLDER.rglob("*.yaml")
    return tuple(sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in files))


def matching_names(pattern: str) -> list[str]:
    """Recipes whose name, folder or last part matches a pattern with wildcards.

    >>> matching_names("coco/rvse*")
    ['coco/rvsepp', 'coco/rvsepp-bigru']
    >>> matching_names("naaf")
    ['coco/naaf', 'f30k/naaf', 'flickr8k/naaf', 'scenes/naaf']
    """
    return [
        name
        for name in recipe_names()
        if "/_" not in name and any(fnmatchcase(text, pattern) for text in (name, *name.split("/")))
    ]


def find_recipe(path: Path) -> Path:
    """The file of a recipe given by name or path; it may not exist."""
    is_name = path.suffix not in SUFFIXES and path.as_posix() in recipe_names()
    return FOLDER / f"{path.as_posix()}.yaml" if is_name else path


def recipe_name(path: Path) -> str | None:
    """The name of a recipe of the package given by name or path; None for any other file."""
    file = find_recipe(path)
    if not file.resolve().is_relative_to(FOLDER):
        return None
    return file.resolve().relative_to(FOLDER).with_suffix("").as_posix()


def suggest_recipes(path: Path) -> str:
    """A hint such as ``; did you mean 'scenes/naaf'?``, or an empty string.

    >>> suggest_recipes(Path("naaf-scenes"))
    "; did you mean 'scenes/naaf'?"
    >>> suggest_recipes(Path("naaf"))
    "; did you mean 'coco/naaf', 'f30k/naaf', 'flickr8k/naaf' or 'scenes/naaf'?"
    """
    given = path.with_suffix("") if path.suffix in SUFFIXES else path
    whole = "/".join(given.parts[-2:])
    last_parts = {name: name.rpartition("/")[2] for name in recipe_names()}
    close_parts = difflib.get_close_matches(given.name, last_parts.values(), 2)
    attempts = [
        [name for name in last_parts if _words(name) == _words(whole)],  # naaf-scenes
        [name for name, part in last_parts.items() if part == given.name],
        difflib.get_close_matches(whole, last_parts, 2),
        [name for name, part in last_parts.items() if part in close_parts],
    ]
    files = {one.stem: str(one) for one in sorted(path.parent.glob("*.yaml"))}
    candidates = [files[stem] for stem in difflib.get_close_matches(given.name, files, 1)]
    candidates += next(filter(None, attempts), [])
    *first, last = [f"'{name}'" for name in candidates] or [""]
    listed = f"{', '.join(first)} or {last}" if first else last
    return f"; did you mean {listed}?" if listed else ""


def _words(name: str) -> set[str]:
    return set(re.split("[/-]", name)) - {"recipes"}


# A few hundred bytes of YAML can expand to billions of values (aliases of aliases), or to more
# levels than Python's recursion limit. Both are counted before any value is built.
MAX_DEPTH = 32
"""Levels of nesting. Recipes have five."""

MAX_VALUES = 10_000
"""Values per document; those behind an alias count at every use."""

MAX_DIGITS = 100
MAX_MESSAGE = 160
_MERGE = "tag:yaml.org,2002:merge"


def parse_yaml(text: str) -> Any:
    """A value of plain types; `yaml.YAMLError` with a message of one line for an invalid text."""
    try:
        return deepcopy(_parse(text))
    except Exception as error:  # with explicit tags such as !!int, constructors raise any error
        raise yaml.YAMLError(_one_line(error)) from None


def typed_value(text: str) -> Any:
    """A value as typed in a command: YAML reads ``|``, ``#`` and 1:30 as others.

    >>> [typed_value(text) for text in ("|", "#", ",", "-", "a #b", "1:30", "'a'", "null", "5e-4")]
    ['|', '#', ',', '-', 'a #b', '1:30', 'a', None, 0.0005]
    """
    if len(text) == 1 and text.isprintable() and not text.isalnum() and text != "~":
        return text  # a separator
    value = parse_yaml(text)
    if text[:1] in ("'", '"', "!"):
        return value
    if isinstance(value, str) or (value is None and text.lower() not in ("", "null", "~")):
        return text
    if isinstance(value, (int, float)) and ":" in text:  # YAML 1.1 counts in sixties
        return text
    return value


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    """Cached: recipes extend the same files repeatedly, and PyYAML is slow."""
    return yaml.load(text, Loader=_RecipeLoader)  # noqa: S506 - a SafeLoader


def _one_line(error: Exception) -> str:
    """The problem and its line, shortened: PyYAML quotes files at any length."""
    if isinstance(error, yaml.reader.ReaderError):
        return _cut(f"{error.reason} (character {error.position + 1})")
    if not isinstance(error, yaml.MarkedYAMLError):
        return _cut(str(error) or type(error).__name__)
    mark = error.problem_mark or error.context_mark
    line = f"line {mark.line + 1}: " if mark is not None else ""
    return line + _cut(error.problem or error.context or "not YAML")


def _cut(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which 5e-4 is a number and a key given twice is an error."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = self._composed = 0
        self._extents: dict[int, tuple[int, int]] = {}  # values and levels below a finished node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._level += 1
        self._composed += 1
        if self._composed > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values")
        if self._level > MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
        is_alias = self.check_event(yaml.AliasEvent)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        if node is None:
            return None
        if is_alias and id(node) not in self._extents:
            raise yaml.YAMLError("an alias refers to the value that it is part of")
        values, levels = self._extents.setdefault(id(node), self._extent(node))
        if values > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, aliases written out")
        if levels > MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels, aliases written out")
        return node

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        below: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            below = node.value
        elif isinstance(node, yaml.MappingNode):
            below = [part for pair in node.value for part in pair]
        extents = [self._extents[id(part)] for part in below]
        return 1 + sum(v for v, _ in extents), 1 + max((n for _, n in extents), default=0)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                raise _error(
                    "merge keys (<<) are not supported; use extends: or write the keys out",
                    key_node,
                )
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, str | int | float | None):
                raise _error("a key is a name, not a list or mapping", key_node)
            if key in keys:
                raise _error(f"the key '{_cut(str(key))}' is given twice", key_node)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > MAX_DIGITS:
            raise _error(f"a number of more than {MAX_DIGITS} digits", node)
        is_int = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


# No dates: a folder may be named like one.
_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != "tag:yaml.org,2002:timestamp"]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
# Only values that JSON has, too: no dates, bytes or sets, not even by an explicit tag.
_RecipeLoader.yaml_constructors = {
    tag: build
    for tag, build in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or not tag.endswith((":timestamp", ":binary", ":omap", ":pairs", ":set"))
}
for _kind in ("int", "float"):
    _RecipeLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _RecipeLoader.construct_number)
