"""Types, ranges and checks of configuration keys, with one clear sentence per mistake. Pure.

`kvmesh.config_sections`, `kvmesh.pool_sections` and `kvmesh.tenants.sections` define sections and tables with it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvmesh.redis_url import without_password


class ConfigError(ValueError):
    """A mistake in the configuration: one sentence with the key, the value and the allowed range."""


class Allowed(msgspec.Struct, frozen=True):
    """Allowed values of a key: an inclusive range, one of `choices`, or a `pattern`, described by `words`.

    `unit` is empty for plain counts and texts; `about` is the key's documentation.
    """

    about: str
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    choices: tuple[str, ...] = ()
    pattern: str = ""
    words: str = ""
    secret: bool = False
    """A URL that may hold a password; it is never shown."""
    hidden: bool = False
    """A text that an operator may mistake for the secret itself; error messages do not show a wrong value."""
    fact: bool = False
    """A fact of an engine: a value that the file gives is compared with the engine, a default is not."""

    def text(self) -> str:
        """Return the range in words, e.g. `1 to 64 blocks` or `"a" or "b"`."""
        if self.words:
            return self.words
        unit = f" {self.unit}" if self.unit else ""
        if self.choices:
            return " or ".join(f'"{choice}"' for choice in self.choices)
        if self.pattern:
            return f"text matching {self.pattern}"
        if math.isinf(self.high):
            return "anything" if math.isinf(self.low) else f"{shown_number(self.low)} or more{unit}"
        return f"{shown_number(self.low)} to {shown_number(self.high)}{unit}"

    def admits(self, value: bool | float | str) -> bool:
        if isinstance(value, str):
            if self.choices:
                return value in self.choices
            return re.fullmatch(self.pattern, value) is not None if self.pattern else True
        return self.low <= value <= self.high  # also refuses NaN


class Mistakes:
    """Collects the sentences of several ConfigErrors, so that an operator sees all mistakes at once."""

    def __init__(self) -> None:
        self._sentences: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note a ConfigError of the block, and go on behind it."""
        try:
            yield
        except ConfigError as error:
            self._sentences += str(error).split("\n")

    def refuse(self) -> None:
        """Raise one ConfigError with a line for each mistake, if there are any."""
        if self._sentences:
            raise ConfigError("\n".join(dict.fromkeys(self._sentences)))


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file. Subclasses override `check` for rules across keys."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for key, kind, allowed in keys(type(self)):
            with mistakes.noted():
                check_value(f"{self.section}.{key}", kind, allowed, getattr(self, key))
        mistakes.refuse()
        self.check()

    def check(self) -> None:
        """Raise ConfigError if two keys of this section contradict each other."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table that the operator names, such as [tenants.search]. MeshConfig checks it.

    An attribute ends in `_` if its key is a keyword of Python: `class_` is the key `class`.
    """

    kind: ClassVar[str] = ""
    """First part of the table's name."""
    about: ClassVar[str] = ""

    def validate(self, name: str) -> None:
        """Raise ConfigError if a value of the table [`kind`.`name`] is wrong."""
        where = f"{self.kind}.{name}"
        if not re.fullmatch(NAME, name):
            raise ConfigError(f'[{where}] has the invalid name "{name}": allowed are {NAME_WORDS}.')
        mistakes = Mistakes()
        for attribute, kind, allowed in keys(type(self)):
            with mistakes.noted():
                check_value(f"{where}.{shown_key(attribute)}", kind, allowed, getattr(self, attribute))
        mistakes.refuse()
        self.check(where)

    def check(self, where: str) -> None:
        """Raise ConfigError if two keys of this table contradict each other."""


NAME: Final = r"[a-z0-9][a-z0-9-]{0,63}"
"""Pattern of the names of tables. The names are parts of Redis keys, inside braces, and label values of metrics."""
NAME_WORDS: Final = "up to 64 of a-z, 0-9 and -"

AnyTable = TypeVar("AnyTable", bound=Table)


def build_table(table: type[AnyTable], name: str, found: Any) -> AnyTable:
    """Build [kind.name] from a plain table: key -> value. Raises ConfigError."""
    where = f"{table.kind}.{name}"
    if not isinstance(found, Mapping):
        shown = "(a text)" if isinstance(found, str) else repr(found)  # a text may be an API key
        raise ConfigError(f"{where} = {shown} is not a table: write [{where}] and its keys below it.")
    attributes = {shown_key(attribute): attribute for attribute, _, _ in keys(table)}
    mistakes = Mistakes()
    with mistakes.noted():
        refuse_unknown(where, found, list(attributes))
    known = {key: value for key, value in found.items() if key in attributes}
    built = table(**{attributes[key]: tuple(v) if isinstance(v, list) else v for key, v in known.items()})
    with mistakes.noted():
        built.validate(name)
    mistakes.refuse()
    return built


@cache
def keys(section: type[msgspec.Struct]) -> tuple[tuple[str, Any, Allowed], ...]:
    """Return (attribute, type, allowed values) for the keys of a section or table, in the order of the file."""
    hints = get_type_hints(section, include_extras=True)
    found = []
    for key in section.__struct_fields__:
        hint = hints[key]
        assert get_origin(hint) is Annotated, f"{section.__name__}.{key} needs Annotated[type, Allowed(...)]"
        kind, allowed = get_args(hint)
        found.append((key, kind, allowed))
    return tuple(found)


def shown_key(attribute: str) -> str:
    """Return the key of `attribute` in the file."""
    return attribute.removesuffix("_")


def refuse_unknown(section: str, found: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError for the keys of `found` that are not in `known`, each with the closest known key."""
    sentences = []
    for key in found:
        if key in known:
            continue
        where = f"{section}.{key}"
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {section}.{near[0]}?" if near else f"allowed are {', '.join(sorted(known))}."
        sentences.append(f"Unknown key {where}: {hint}")
    if sentences:
        raise ConfigError("\n".join(sentences))


def refuse_unknown_name(where: str, value: str, known: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `value` is in `known`."""
    if value not in known:
        names = ", ".join(sorted(known)[:NAMES_SHOWN])
        more = ", ..." if len(known) > NAMES_SHOWN else ""
        allowed = f"allowed are {names}{more}" if known else "the configuration names none"
        raise ConfigError(f'{where} = "{value}" is unknown: {allowed}.')


NAMES_SHOWN: Final = 20
"""Most names that one sentence lists."""


def check_value(name: str, kind: Any, allowed: Allowed, value: Any) -> None:
    """Raise ConfigError unless `value` is of `kind` and allowed. None is the value of an absent optional number."""
    if kind in OPTIONAL:
        if value is None:
            return
        kind = OPTIONAL[kind]
    accepted: tuple[type, ...] = (int, float) if kind is float else (tuple,) if kind == TEXTS else (kind,)
    if type(value) not in accepted or (kind == TEXTS and any(type(item) is not str for item in value)):
        shown = _shown(allowed, value)
        raise ConfigError(f"{name} = {shown} is not {WORDS[kind]}: allowed is {allowed.text()}.")
    for each in value if kind == TEXTS else (value,):
        if not allowed.admits(each):
            raise ConfigError(
                f"{name} = {_shown(allowed, value)} is out of range: allowed is {allowed.text()}."
            )


TEXTS: Final = tuple[str, ...]
OPTIONAL: Final[Mapping[Any, Any]] = {float | None: float, int | None: int}
WORDS: Final[Mapping[Any, str]] = {
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    bool: "true or false",
    TEXTS: "a list of texts in quotes",
}


def _shown(allowed: Allowed, value: Any) -> str:
    if allowed.hidden and value:
        return "(not shown)"
    if isinstance(value, str):
        return f'"{without_password(value) if allowed.secret else value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(allowed, each) for each in value)}]"
    return repr(value)


def shown_number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
