"""YAML as recipes write it, read within limits of size and nesting.

A few hundred bytes of YAML can stand for billions of values (aliases of aliases), or for more
levels than Python can walk. Both are counted while the text is composed, before anything is built.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_DEPTH = 32
"""Levels of nesting. Recipes have five."""

MAX_VALUES = 10_000
"""Values of a document, those behind an alias counted each time it is used."""

MAX_DIGITS = 100


def parse_yaml(text: str) -> Any:
    """A value of plain types; whatever is wrong with the text is a `yaml.YAMLError`."""
    try:
        return yaml.load(text, Loader=_RecipeLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        raise
    except Exception as error:  # explicit tags such as !!int make constructors raise anything
        raise yaml.YAMLError(str(error) or type(error).__name__) from None


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
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, str | int | float | None):
                raise yaml.YAMLError(f"a key is a name, not a list or mapping, {node.start_mark}")
            if key in keys:
                raise yaml.YAMLError(f"the key '{key}' is given twice, {node.start_mark}")
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > MAX_DIGITS:
            raise yaml.YAMLError(f"a number of more than {MAX_DIGITS} digits, {node.start_mark}")
        is_int = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


# A folder named like a date is a folder.
_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != "tag:yaml.org,2002:timestamp"]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
# Values are what JSON has, too: no dates, bytes or sets, not even by an explicit tag.
_RecipeLoader.yaml_constructors = {
    tag: build
    for tag, build in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or not tag.endswith((":timestamp", ":binary", ":omap", ":pairs", ":set"))
}
for _kind in ("int", "float"):
    _RecipeLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _RecipeLoader.construct_number)
