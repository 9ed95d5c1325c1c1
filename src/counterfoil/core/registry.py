"""Registries of named parts: encoders, poolings, matchers, objectives, data sources, models.

The keyword-only arguments of a registered class are its options. They are checked against its
signature, so a typo is an error that names the nearest option. Numbers and named choices are also
checked if the class is built directly, without its registry.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import importlib
import inspect
import json
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from counterfoil.core.errors import ArgumentError, ConfigError, UnknownNameError, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T", bound=Callable[..., Any])

own_modules: list[str] = []
"""The user's modules that register parts; processes that start afresh import them, too."""


def import_own(modules: list[str]) -> None:
    """Import modules that register parts, and note them for other processes."""
    for module in modules:
        importlib.import_module(module)
        if module not in own_modules:
            own_modules.append(module)


IF_OWN = (
    "if it is your own, import the module that registers it (counterfoil --import MODULE, or "
    "import it in Python)"
)
"""Advice on a name that is not registered."""

MISSPELT = 0.8
"""Share of letters, as `difflib` counts, from which an unknown name is surely a misspelt one."""


def own_advice(name: str, known: Iterable[str]) -> str:
    """`IF_OWN` after a semicolon, unless the name is surely a misspelt one of those known."""
    misspelt = difflib.get_close_matches(str(name), list(known), n=1, cutoff=MISSPELT)
    return "" if misspelt else f"; {IF_OWN}"


MAX_NUMBER = 2**32
"""Largest absolute value of an option; only seeds come near it."""

OPTIONS = "_options_when_built"
"""Attribute of a part with the options that it was built with, for its `repr`."""

MAX_LAYERS = 1000
"""Layers of a network; a million would take minutes to build before memory runs out."""


class Registry(Generic[T]):
    """Classes or functions by public name; registering a name twice raises.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... class Square:
    ...     '''Four equal sides.'''
    ...     def __init__(self, *, side: float = 1.0) -> None:
    ...         self.side = side
    >>> shapes.create("square", {"side": 2.0}).side
    2.0
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            if inspect.isclass(entry):
                _check_when_built(entry)
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            hint, listed = nearest(name, self._entries), ", ".join(sorted(self._entries))
            own = own_advice(name, self._entries)
            raise UnknownNameError(f"unknown {self.kind} '{name}'{hint} (known: {listed}){own}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def names(self, pattern: str = "*") -> list[str]:
        return fnmatch.filter(self, pattern)

    def summary(self, name: str) -> str:
        """First line of the entry's docstring."""
        return (inspect.getdoc(self[name]) or "").split("\n", 1)[0]

    def options(self, name: str) -> dict[str, Any]:
        """The entry's options (keyword-only parameters) with their defaults."""
        return dict(_options(self[name]))

    def path_options(self, name: str) -> set[str]:
        """Names of the options that are declared as paths."""
        hints = _hints(self[name])
        return {key for key in self.options(name) if Path in (hints[key], *get_args(hints[key]))}

    def check(self, name: str, options: Mapping[str, Any], *, where: str = "") -> None:
        """Raise on an unknown option, or a value of the wrong type."""
        from pydantic import ValidationError

        known = _options(self[name])
        for key, value in options.items():
            path = f"{where}.{key}" if where else key
            if key not in known:
                raise ConfigError(
                    f"{path}: {self.kind} '{name}' has no option '{key}'{nearest(key, known)} "
                    f"(options: {', '.join(known) or 'none'})"
                )
            try:
                _validator(self[name], key).validate_python(value, strict=True)
            except ValidationError as error:
                expected = error.errors()[0]["msg"]
                raise ConfigError(f"{path}: {expected}, got {short_repr(value)}") from None
            is_depth = key == "layers" or key.endswith("_layers")
            _check_numbers(value, path, MAX_LAYERS if is_depth else MAX_NUMBER)

    def create(self, name: str, options: Mapping[str, Any], *args: Any, where: str = "") -> Any:
        """Build an entry from the caller's ``args`` and the user's ``options``."""
        self.check(name, options, where=where)
        with self._refusals(name, options, where):
            return self[name](*args, **options)

    @contextmanager
    def _refusals(self, name: str, options: Mapping[str, Any], where: str) -> Iterator[None]:
        """Turn the error of a library that refuses a value into `ConfigError`.

        Without options the user has nothing to change: the error is a bug and is raised as it is.
        """
        try:
            yield
        except (ValueError, ArithmeticError, RuntimeError) as error:
            if not options or not _is_refusal(error):
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{where or self.kind}: '{name}' cannot be built with {short_repr(dict(options))}: "
                f"{reason}"
            ) from error


def _check_when_built(entry: Any) -> None:
    """Let a class refuse options that are not the number, flag or choice that it expects."""
    build = entry.__init__
    options = {
        key: parameter.default
        for key, parameter in inspect.signature(build).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    if not options:
        return

    @cache
    def kinds() -> dict[str, set[Any]]:
        """The types of each option that takes a number, a flag or a choice, and maybe None."""
        hints = get_type_hints(build)
        unions = (Union, UnionType)
        types = {
            key: {*get_args(hint)} if get_origin(hint) in unions else {hint}
            for key, hint in hints.items()
            if key in options
        }
        return {
            key: one
            for key, one in types.items()
            if one <= {int, float, type(None)}
            or one <= {bool, type(None)}
            or _choices(one) is not None
        }

    @functools.wraps(build)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        # the options of a subclass were recorded first, and stay
        getattr(self, "__dict__", {}).setdefault(OPTIONS, options | given)
        infinite = getattr(self, "may_be_infinite", ())
        for key in kinds().keys() & given.keys():
            where, types, value = f"{type(self).__name__}({key}=…)", kinds()[key], given[key]
            if bool in types:
                _require_flag(where, value, types)
            elif _choices(types) is None:
                _require_number(where, value, types)
                if isinstance(value, float) and math.isinf(value) and key not in infinite:
                    raise ArgumentError(f"{where}: expected a finite number, got {value}")
        build(self, *args, **given)  # first: a class may refuse a choice with advice of its own
        for key in kinds().keys() & given.keys():
            choices = _choices(kinds()[key])
            if choices is not None and given[key] not in choices:
                raise ArgumentError(
                    f"{type(self).__name__}({key}=…): expected {' or '.join(map(repr, choices))}, "
                    f"got {short_repr(given[key])}"
                )

    entry.__init__ = checked


def _choices(types: set[Any]) -> list[Any] | None:
    """The values that one `Literal`, and maybe None, allows; None for other types."""
    literals = [one for one in types if get_origin(one) is Literal]
    if len(literals) != 1 or types - {*literals, type(None)}:
        return None
    return [*get_args(literals[0]), *([None] if type(None) in types else [])]


def _require_flag(where: str, value: Any, types: set[Any]) -> None:
    is_flag = type(value).__name__ in ("bool", "bool_")  # Python's and NumPy's
    if not is_flag and not (value is None and type(None) in types):
        raise ArgumentError(f"{where}: expected True or False, got {short_repr(value)}")


def _require_number(where: str, value: Any, types: set[Any]) -> None:
    kind = numbers.Real if float in types else numbers.Integral
    is_number = not isinstance(value, bool) and isinstance(value, kind) and value == value
    if not is_number and not (value is None and type(None) in types):
        expected = "a number" if float in types else "a whole number"
        expected += " or None" if type(None) in types else ""
        raise ArgumentError(f"{where}: expected {expected}, got {short_repr(value)}")


def options_repr(part: Any, *notes: str) -> str:
    """``Name(option=value, …, note)`` of a registered part: the options that it was built with.

    A number, choice or name that the part stores under the name of an option is shown as stored.
    """
    built_with = vars(part).get(OPTIONS, {})
    values = {}
    for one in inspect.signature(type(part)).parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            value = getattr(part, one.name, part)
            if not isinstance(value, bool | int | float | str | None):
                value = built_with.get(one.name, part)
            if value is not part:  # neither stored nor known
                values[one.name] = short_repr(value)
    listed = [f"{name}={value}" for name, value in values.items()]
    return f"{type(part).__name__}({', '.join([*listed, *notes])})"


# Cached: a plan of a hundred runs checks the same few entries thousands of times.
@cache
def _options(entry: Callable[..., Any]) -> dict[str, Any]:
    return {
        key: parameter.default
        for key, parameter in inspect.signature(entry).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _keyword_options(entry: Callable[..., Any]) -> list[str] | None:
    """The options of an entry; None if it takes any."""
    kinds = {one.kind for one in inspect.signature(entry).parameters.values()}
    return None if inspect.Parameter.VAR_KEYWORD in kinds else list(_options(entry))


@cache
def _hints(entry: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(entry.__init__ if inspect.isclass(entry) else entry)


@cache
def _validator(entry: Callable[..., Any], option: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_hints(entry).get(option, Any))


def declared(package: str, registry: str) -> dict[str, list[str] | None]:
    """Names that one of our packages registers, with their options, parsed from its source.

    Importing the package would import torch, which takes seconds. If it is imported already, the
    entries are those of its registry, also a user's own. Options are None if the entry has no
    signature of its own. The result is empty without source files.
    """
    imported = sys.modules.get(f"counterfoil.{package}")
    if imported is not None:
        registered: Registry[Any] | dict[str, Any] = getattr(imported, registry, {})
        return {name: _keyword_options(registered[name]) for name in registered}
    entries: dict[str, list[str] | None] = {}
    for path in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f"@{registry}.register(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                for name in _registered_names(node, registry):
                    entries[name] = _declared_options(node)
    return entries


def _registered_names(node: ast.ClassDef | ast.FunctionDef, registry: str) -> Iterator[str]:
    for call in node.decorator_list:
        if (
            isinstance(call, ast.Call)
            and ast.unparse(call.func) == f"{registry}.register"
            and isinstance(call.args[0], ast.Constant)
        ):
            yield str(call.args[0].value)


def _declared_options(node: ast.ClassDef | ast.FunctionDef) -> list[str] | None:
    body = node.body if isinstance(node, ast.ClassDef) else [node]
    for part in body:
        if isinstance(part, ast.FunctionDef) and part.name in ("__init__", node.name):
            return None if part.args.kwarg else [option.arg for option in part.args.kwonlyargs]
    return None


def _is_refusal(error: Exception) -> bool:
    """Whether a library refused a value; PyTorch raises a RuntimeError about a size."""
    if isinstance(error, UnicodeError):
        return False
    if not isinstance(error, RuntimeError):
        return True
    words = ("negative dimension", "invalid shape", "must be positive", "must be greater than")
    return type(error) is RuntimeError and any(word in str(error) for word in words)


def _check_numbers(value: Any, path: str, most: int) -> None:
    """Refuse numbers that are not finite or too large, also within lists and mappings."""
    if isinstance(value, float | int) and not abs(value) <= most:  # also true for nan
        raise ConfigError(
            f"{path}: expected a finite number of at most {most:,}, got {short_repr(value)}"
        )
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_numbers(item, path, most)


def short_repr(value: Any) -> str:
    """``repr``, cut after 100 characters, for error messages."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def refuse_unused(part: type, key: str, mode: str, **given: Any) -> None:
    """Raise on options that have no effect in a ``mode`` of a part, unless they are the defaults.

    Otherwise a reader of the config would believe that they are in force.
    """
    parameters = inspect.signature(part).parameters
    unused = {name: value for name, value in given.items() if value != parameters[name].default}
    if not unused:
        return
    stated = " ".join(f"{key}.{name}={_as_override(value)}" for name, value in unused.items())
    reset = " ".join(f"{key}.{name}={_as_override(parameters[name].default)}" for name in unused)
    one = len(unused) == 1
    raise ConfigError(
        f"{stated} {'has' if one else 'have'} no effect with {mode}: set {reset} "
        f"({'its default' if one else 'the defaults'}), or remove {'it' if one else 'them'} from "
        "the recipe"
    )


def _as_override(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) and value else json.dumps(value)
