"""Overrides: an operator's changes of organisations, tenants and keys while the mesh runs. Pure.

There is one entry per table, named like the scope that it limits, for example "organisation:acme", "tenant:search" or
"key:search-prod". An unusable entry is left out with one sentence, without harm to other entries. A tenant or key that the
entry disables stays disabled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from kvmesh.config_keys import (
    ConfigError,
    Table,
    build_table,
    check_value,
    keys,
    refuse_unknown,
    refuse_unknown_name,
    shown_key,
)
from kvmesh.tenants.sections import (
    STANDARD,
    ClassTable,
    KeyTable,
    Limited,
    OrganisationTable,
    TenantTable,
)

LIMITS: Final = tuple(shown_key(key) for key, _, _ in keys(Limited))

CHANGEABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "organisation": LIMITS,
    "tenant": (*LIMITS, "class", "weight", "strict", "clamp", "cached_discount", "disabled"),
    "key": (*LIMITS, "disabled"),
}
"""Kind of a scope -> keys that may be changed while the mesh runs.

The organisation of a tenant and the tenant of a key cannot be changed so.
"""

NEW_KEY_FIELDS: Final = ("tenant", "sha256", "gateway")
"""Further fields of an entry for an API key that is not in the configuration."""

DELETED: Final[Mapping[str, Any]] = {"deleted": True, "disabled": True}
"""Entry of a deleted key. The entry is kept, because a frontend would otherwise restore the earlier entry. If the file
has a key of that name, the key stays disabled."""

TABLE_OF: Final[Mapping[str, type[Limited]]] = {
    "organisation": OrganisationTable,
    "tenant": TenantTable,
    "key": KeyTable,
}


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of one table. A JSON object in Redis."""

    version: int
    """Version, which grows with each change: the time of Redis in milliseconds, or the version before plus 1."""
    changes: dict[str, Any]
    """Key of the table -> value."""


def read(
    found: Mapping[bytes, bytes], known: Mapping[str, Override]
) -> tuple[dict[str, Override], dict[str, Override], list[str]]:
    """Return the overrides in force, those of them that Redis lacks, and one sentence for each unreadable entry.

    `found` are the entries in Redis, `known` the overrides in force before. INVARIANT: no override is ever removed. An
    entry that is missing, or older than the known one, was lost with the memory of Redis; the known override stays in
    force. The same holds for an entry that has become unreadable.
    """
    overrides, problems = dict(known), list[str]()
    names = {name.decode(errors="replace"): entry for name, entry in found.items()}
    missing = {scope: override for scope, override in known.items() if scope not in names}
    for scope, entry in names.items():
        try:
            override = _decoder.decode(entry)
        except msgspec.DecodeError as error:
            problems.append(f"{scope}: the entry cannot be read ({error}).")
            continue
        if scope in known and override.version < known[scope].version:
            missing[scope] = known[scope]
        else:
            overrides[scope] = override
    return overrides, missing, problems


_decoder: Final = msgspec.json.Decoder(Override)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All tables of classes, organisations, tenants and keys."""

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
    """Return `tables` with `overrides` applied, and one sentence for each unusable entry."""
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
    """Return the table `name` of `kind` with `changes`. Raises ConfigError with key, value and allowed range."""
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
            f"{where} cannot be changed: the configuration has no [{where}]. Allowed are "
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
    """Return the changes of `key=value` texts; None stands for the configuration's value. Raises ConfigError."""
    table = TABLE_OF[kind]
    where = f"{table.kind}.{name}"
    known = {shown_key(key): (kind_of, allowed) for key, kind_of, allowed in keys(table)}
    changes: dict[str, Any] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(
                f'"{text}" is not a change: allowed is key=value, or key= for the value in the file.'
            )
        refuse_unknown(where, [key], CHANGEABLE[kind])
        kind_of, allowed = known[key]
        changes[key] = None if not value else _read(kind_of, value)
        if value:
            check_value(f"{where}.{key}", kind_of, allowed, changes[key])
    return changes


def _read(kind: Any, text: str) -> Any:
    """Return `text` as a value of `kind`, or the text itself if it is none; the later check reports the mistake."""
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
    """Return whether the file has the same value as the entry of a key that was made while the mesh ran."""
    return key in NEW_KEY_FIELDS and bool(getattr(table, key, None) == value)
