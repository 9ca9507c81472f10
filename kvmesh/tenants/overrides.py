"""Changes that an operator made while the mesh runs: laid over the configuration's organisations, tenants and keys.

Pure. One entry a table, named like the scope that it limits: "organisation:acme", "tenant:search", "key:search-prod". An
entry that cannot be used is left out, with a sentence, and harms no other; but who is disabled in it stays disabled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from kvmesh.config_keys import ConfigError, Table, build_table, check_value, keys, refuse_unknown, shown_key
from kvmesh.tenants.sections import (
    STANDARD,
    ClassTable,
    KeyTable,
    Limited,
    OrganisationTable,
    TenantTable,
    refuse_unknown_name,
)

LIMITS: Final = tuple(shown_key(key) for key, _, _ in keys(Limited))

CHANGEABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "organisation": LIMITS,
    "tenant": (*LIMITS, "class", "weight", "strict", "clamp", "cached_discount", "disabled"),
    "key": (*LIMITS, "disabled"),
}
"""Kind of a scope -> keys that may be changed while the mesh runs. Who belongs to whom is the configuration's alone."""

NEW_KEY_FIELDS: Final = ("tenant", "sha256", "gateway")
"""What an entry says besides, of a key that the configuration does not know."""

DELETED: Final[Mapping[str, Any]] = {"deleted": True, "disabled": True}
"""The entry of a key that is gone. It stays, for else a frontend would put back what was there before; and where a file
has a key of that name all the same, it stays disabled."""

TABLE_OF: Final[Mapping[str, type[Limited]]] = {
    "organisation": OrganisationTable,
    "tenant": TenantTable,
    "key": KeyTable,
}


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of one table. A JSON object in Redis."""

    version: int
    """Grows with each change of the entry: the time of Redis, in milliseconds, or one more than before."""
    changes: dict[str, Any]
    """Key of the table -> value."""


def read(
    found: Mapping[bytes, bytes], known: Mapping[str, Override]
) -> tuple[dict[str, Override], dict[str, Override], list[str]]:
    """Return what holds now, what of it Redis lacks, and a sentence for each entry that nobody can read.

    `found` is what Redis has, `known` what held before. No entry is ever removed: one that is not there, or is older than
    the one that is known, was lost with the memory of Redis and holds on. So does one that cannot be read any more.
    """
    overrides, problems = dict(known), list[str]()
    names = {name.decode(errors="replace"): entry for name, entry in found.items()}
    missing = {scope: override for scope, override in known.items() if scope not in names}
    for scope, entry in names.items():
        try:
            override = _decoder.decode(entry)
        except msgspec.DecodeError as error:
            problems.append(f"{scope}: the entry cannot be read: {error}.")
            continue
        if scope in known and override.version < known[scope].version:
            missing[scope] = known[scope]
        else:
            overrides[scope] = override
    return overrides, missing, problems


_decoder: Final = msgspec.json.Decoder(Override)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Everything the configuration says of who may use the mesh."""

    classes: Mapping[str, ClassTable] = field(default_factory=dict)
    organisations: Mapping[str, OrganisationTable] = field(default_factory=dict)
    tenants: Mapping[str, TenantTable] = field(default_factory=dict)
    keys: Mapping[str, KeyTable] = field(default_factory=dict)

    def named(self, kind: str) -> Mapping[str, Limited]:
        """Return the tables of a kind of scope: "organisation", "tenant" or "key"."""
        found: Mapping[str, Mapping[str, Limited]] = {
            "organisation": self.organisations,
            "tenant": self.tenants,
            "key": self.keys,
        }
        return found[kind]


def apply(tables: Tables, overrides: Mapping[str, Override]) -> tuple[Tables, list[str]]:
    """Return `tables` with `overrides` laid over them, and a sentence for each entry that could not be used."""
    result = {kind: dict(tables.named(kind)) for kind in CHANGEABLE}
    problems: list[str] = []
    for kind, found in result.items():
        for scope, override in sorted(overrides.items()):
            if not scope.startswith(f"{kind}:"):
                continue
            name = scope.partition(":")[2]
            if override.changes == DELETED and kind == "key" and name not in found:
                continue
            try:
                found[name] = changed(_with(tables, result), kind, name, override.changes)
            except ConfigError as error:
                problems.append(f"{scope}: {error}")
                if override.changes.get("disabled") is True and hasattr(found.get(name), "disabled"):
                    found[name] = msgspec.structs.replace(found[name], disabled=True)
    problems += [
        f"{scope}: allowed are names that begin with {', '.join(f'{kind}:' for kind in CHANGEABLE)}."
        for scope in overrides
        if scope.partition(":")[0] not in CHANGEABLE
    ]
    return _with(tables, result), problems


def changed(tables: Tables, kind: str, name: str, changes: Mapping[str, Any]) -> Limited:
    """Return the table `name` of `kind` with `changes`. Raises ConfigError: key, value, and what is allowed."""
    table, before = TABLE_OF[kind], tables.named(kind).get(name)
    where = f"{table.kind}.{name}"
    if before is None and kind == "key":
        refuse_unknown(where, changes, (*CHANGEABLE[kind], *NEW_KEY_FIELDS))
        new = build_table(KeyTable, name, dict(changes))
        refuse_unknown_name(f"{where}.tenant", new.tenant, tables.tenants)
        for other, key in tables.keys.items():
            if key.sha256 == new.sha256:
                raise ConfigError(f"{where}.sha256 is taken by keys.{other}: allowed is each hash once.")
        return new
    if before is None:
        raise ConfigError(
            f"{where} cannot be changed: there is no [{where}] in the configuration. Allowed are "
            f"{', '.join(sorted(tables.named(kind))) or 'none'}."
        )
    own = {key: value for key, value in changes.items() if not _is_in_file_already(before, key, value)}
    refuse_unknown(where, own, CHANGEABLE[kind])
    after = _replaced(before, own)
    after.validate(name)
    if isinstance(after, TenantTable):
        refuse_unknown_name(f"{where}.class", after.class_, {STANDARD: None, **tables.classes})
    return after


def parse_changes(kind: str, name: str, given: Iterable[str]) -> dict[str, Any]:
    """Return what `key=value` texts say; None stands for "as the configuration has it". Raises ConfigError."""
    table = TABLE_OF[kind]
    where = f"{table.kind}.{name}"
    known = {shown_key(key): (kind_of, allowed) for key, kind_of, allowed in keys(table)}
    changes: dict[str, Any] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(
                f'"{text}" is no change: allowed is key=value, and key= for what the file says.'
            )
        refuse_unknown(where, [key], CHANGEABLE[kind])
        kind_of, allowed = known[key]
        changes[key] = None if not value else _read(kind_of, value)
        if value:
            check_value(f"{where}.{key}", kind_of, allowed, changes[key])
    return changes


def _read(kind: Any, text: str) -> Any:
    """Return `text` as a value of `kind`, or the text itself where it is none: the check tells what is wrong."""
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    try:
        return int(text) if kind is int else float(text) if kind is float else text
    except ValueError:
        return text


def _with(tables: Tables, found: Mapping[str, Mapping[str, Any]]) -> Tables:
    return Tables(
        classes=tables.classes,
        organisations=found["organisation"],
        tenants=found["tenant"],
        keys=found["key"],
    )


TableT = TypeVar("TableT", bound=Table)


def _replaced(table: TableT, changes: Mapping[str, Any]) -> TableT:
    attributes = {shown_key(attribute): attribute for attribute, _, _ in keys(type(table))}
    return msgspec.structs.replace(table, **{attributes[key]: value for key, value in changes.items()})


def _is_in_file_already(table: Table, key: str, value: Any) -> bool:
    """Tell whether the file has taken over what the entry says of a key that was made before it was in the file."""
    return key in NEW_KEY_FIELDS and bool(getattr(table, key, None) == value)
