"""The one configuration file, `kvmesh.toml`: typed, strict, printed at start.

A wrong value, an unknown key or an impossible combination raises `ConfigError`
with one sentence: the key, the value and the allowed range.

The sections are in `kvmesh.config_sections`. The tables that the operator names
are in `kvmesh.pool_sections` (`[pools.NAME]`), `kvmesh.region_sections`
(`[regions.NAME]`) and `kvmesh.tenants.sections` (`[tenants.NAME]`). This module
reads no environment variables. Relative paths start at `ROOT`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from kvmesh import pool_sections, region_sections
from kvmesh.config_keys import (
    NAME_WORDS,
    Allowed,
    ConfigError,
    Mistakes,
    Section,
    Table,
    build_table,
    keys,
    refuse_unknown,
    refuse_unknown_name,
    shown_key,
)
from kvmesh.config_sections import (
    ROOT,
    Control,
    Decode,
    Engine,
    Frontend,
    Mesh,
    Prefill,
    Redis,
    Router,
    Telemetry,
    Trust,
    WarmUp,
)
from kvmesh.deadlines import RUNTIME_MAX_S
from kvmesh.pool_sections import PoolTable, VersionTable
from kvmesh.redis_url import without_password
from kvmesh.region_sections import Region, RegionTable
from kvmesh.roles import EXTERNAL
from kvmesh.tenants import sections as tenant_sections
from kvmesh.tenants.sections import ClassTable, KeyTable, OrganisationTable, TenantTable

__all__ = [
    "ROOT",
    "RUNTIME_MAX_S",
    "ConfigError",
    "MeshConfig",
    "build",
    "describe",
    "keys",
    "load",
    "parse",
    "sections",
]

TABLES: Final[Mapping[str, type[Table]]] = {
    **pool_sections.TABLES,
    **region_sections.TABLES,
    **tenant_sections.TABLES,
}
"""Tables that the operator names, in the order of the file."""


class MeshConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All sections. `MeshConfig()` is the default small mesh."""

    mesh: Mesh = msgspec.field(default_factory=Mesh)
    redis: Redis = msgspec.field(default_factory=Redis)
    engine: Engine = msgspec.field(default_factory=Engine)
    prefill: Prefill = msgspec.field(default_factory=Prefill)
    decode: Decode = msgspec.field(default_factory=Decode)
    router: Router = msgspec.field(default_factory=Router)
    frontend: Frontend = msgspec.field(default_factory=Frontend)
    control: Control = msgspec.field(default_factory=Control)
    warm_up: WarmUp = msgspec.field(default_factory=WarmUp)
    region: Region = msgspec.field(default_factory=Region)
    trust: Trust = msgspec.field(default_factory=Trust)
    telemetry: Telemetry = msgspec.field(default_factory=Telemetry)
    pools: Mapping[str, PoolTable] = msgspec.field(default_factory=dict)
    versions: Mapping[str, VersionTable] = msgspec.field(default_factory=dict)
    regions: Mapping[str, RegionTable] = msgspec.field(default_factory=dict)
    classes: Mapping[str, ClassTable] = msgspec.field(default_factory=dict)
    organisations: Mapping[str, OrganisationTable] = msgspec.field(default_factory=dict)
    tenants: Mapping[str, TenantTable] = msgspec.field(default_factory=dict)
    keys: Mapping[str, KeyTable] = msgspec.field(default_factory=dict)
    given: frozenset[str] = frozenset()
    """Facts of an engine that the file gives, as "engine.kv_blocks". One that differs from its default is given, too."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "given", self.given | self._changed_facts())
        mistakes = Mistakes()
        with mistakes.noted():
            pool_sections.validate(self.pools, self.versions, arithmetic=self.engine.arithmetic)
        with mistakes.noted():
            tenant_sections.validate(self.classes, self.organisations, self.tenants, self.keys)
        with mistakes.noted():
            region_sections.validate(self.region, self.regions, is_trusted=bool(self.trust.certificate))
        for check in (self._check_tenants, self._check_frontend, self._check_engines):
            with mistakes.noted():
                check()
        mistakes.refuse()

    def _changed_facts(self) -> frozenset[str]:
        default = Engine()
        return frozenset(name for name, key in facts() if getattr(self.engine, key) != getattr(default, key))

    def _check_frontend(self) -> None:
        if self.frontend.max_output_tokens_default >= self.engine.max_sequence_tokens:
            raise ConfigError(
                f"frontend.max_output_tokens_default = {self.frontend.max_output_tokens_default} leaves no "
                f"tokens for a prompt: allowed are 1 to {self.engine.max_sequence_tokens - 1} tokens "
                "(engine.max_sequence_tokens - 1)."
            )
        if self.frontend.client_authority and not self.trust.certificate:
            raise ConfigError(
                'frontend.client_authority needs trust.certificate, which is "": health checks then show a certificate '
                "of the mesh to the frontend."
            )

    def _check_engines(self) -> None:
        """Raise ConfigError unless the addresses of engines are given where the engines are external, and only there."""
        given: dict[str, tuple[str, ...]] = {"decode.engines": self.decode.engines}
        others = {"prefill.engines": self.prefill.engines}
        if self.pools:
            others |= given
            given = {f"pools.{name}.decode_engines": pool.decode_engines for name, pool in self.pools.items()}
            others |= {
                f"pools.{name}.prefill_engines": pool.prefill_engines for name, pool in self.pools.items()
            }
        is_external = self.engine.kind == EXTERNAL
        mistakes = Mistakes()
        for key, addresses in (given | others).items():
            with mistakes.noted():
                if addresses and not is_external:
                    raise ConfigError(
                        f'{key} needs engine.kind = "{EXTERNAL}": it is "{self.engine.kind}", for which `kvmesh up` '
                        "starts the engines."
                    )
                if addresses and self.pools and not key.startswith("pools."):
                    role = key.partition(".")[0]
                    raise ConfigError(
                        f"{key} is not used beside [pools.NAME]: allowed is pools.NAME.{role}_engines."
                    )
                if is_external and not addresses and key in given:
                    raise ConfigError(
                        f'{key} = [] beside engine.kind = "{EXTERNAL}": allowed is one address of an engine or more.'
                    )
        taken = [address for addresses in (given | others).values() for address in addresses]
        for address in dict.fromkeys(taken):
            with mistakes.noted():
                if taken.count(address) > 1:
                    raise ConfigError(
                        f'"{address}" is the engine of {taken.count(address)} replicas: allowed is one for each engine.'
                    )
        mistakes.refuse()

    def _check_tenants(self) -> None:
        anonymous, runtime_max_s = self.frontend.anonymous_tenant, self.frontend.runtime_max_s
        if anonymous and anonymous not in self.tenants:
            raise ConfigError(
                f'frontend.anonymous_tenant = "{anonymous}" is unknown: allowed are '
                f"{', '.join(sorted(self.tenants)) or 'names of tenants, but there are none'}."
            )
        for name, each in self.classes.items():
            longest_s = each.runtime_max_s or runtime_max_s
            if each.default_deadline_s > longest_s:
                raise ConfigError(
                    f"classes.{name}.default_deadline_s = {each.default_deadline_s:g} is longer than the maximum runtime "
                    f"of the class: allowed are 0.1 to {longest_s:g} s."
                )
        for name, tenant in self.tenants.items():
            for region in tenant.regions:
                refuse_unknown_name(f"tenants.{name}.regions", region, self.regions)
            for key in ("identities", "gateway_identities"):
                if getattr(tenant, key) and not self.frontend.client_authority:
                    raise ConfigError(
                        f'tenants.{name}.{key} needs frontend.client_authority, which is "": without it the frontend '
                        "does not read client certificates."
                    )

    @property
    def runtime_longest_s(self) -> float:
        """Longest runtime of a request of any class, in seconds."""
        return max(self.frontend.runtime_max_s, *(each.runtime_max_s for each in self.classes.values()), 0.0)


def load(path: str | Path) -> MeshConfig:
    """Read and check the file at `path`. Keys that are left out take their defaults.

    Raises ConfigError with one sentence, also if the file is missing or is not TOML.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The configuration {path} is not UTF-8 text.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The configuration {path} is not TOML: {error}.") from error


def parse(text: str) -> MeshConfig:
    """Build the configuration from TOML text. Raises ConfigError or TOMLDecodeError."""
    return build(tomllib.loads(text))


def build(tables: Mapping[str, Any]) -> MeshConfig:
    """Build the configuration from plain tables: section -> key -> value. Raises ConfigError."""
    kinds: dict[str, type[Section]] = sections()
    mistakes = Mistakes()
    with mistakes.noted():
        _refuse_unknown_sections(tables, [*kinds, *TABLES])
    built: dict[str, Any] = {}
    for name, table in tables.items():
        with mistakes.noted():
            if name not in kinds and name not in TABLES:
                continue  # noted above
            if not isinstance(table, Mapping):
                raise ConfigError(
                    f"{name} = {table!r} is not a section: write [{name}] and its keys below it."
                )
            if name in TABLES:
                built[name] = _tables(TABLES[name], table)
            else:
                built[name] = _section(name, kinds[name], table)
    mistakes.refuse()
    engine = tables.get(Engine.section, {})
    return MeshConfig(**built, given=frozenset(name for name, key in facts() if key in engine))


def facts() -> list[tuple[str, str]]:
    """Return (full name, key) of the keys of [engine] that are facts of an engine."""
    return [(f"{Engine.section}.{key}", key) for key, _, allowed in keys(Engine) if allowed.fact]


def _section(name: str, kind: type[Section], table: Mapping[str, Any]) -> Section:
    """Build a section. Raises ConfigError with all its mistakes."""
    mistakes = Mistakes()
    known = [key for key, _, _ in keys(kind)]
    with mistakes.noted():
        refuse_unknown(name, table, known)
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
        if key in known
    }
    made = None
    with mistakes.noted():
        made = kind(**values)
    mistakes.refuse()
    assert made is not None
    return made


def _tables(kind: type[Table], tables: Mapping[str, Any]) -> dict[str, Table]:
    """Build the tables of one kind. Raises ConfigError with the mistakes of all of them."""
    mistakes, built = Mistakes(), dict[str, Table]()
    for name, found in tables.items():
        with mistakes.noted():
            built[name] = build_table(kind, name, found)
    mistakes.refuse()
    return built


def sections() -> dict[str, type[Section]]:
    """Return the sections of fixed names, in the order of the file."""
    return {
        name: kind
        for name, kind in get_type_hints(MeshConfig).items()
        if name in MeshConfig.__struct_fields__ and name not in TABLES and name != "given"
    }


def describe(config: MeshConfig) -> str:
    """Return `config` as commented TOML without passwords, for the documentation and for the start of a process."""
    lines = []
    for name, kind in sections().items():
        lines.append(f"[{name}]")
        for key, _, allowed in keys(kind):
            value = getattr(getattr(config, name), key)
            shown = _described(key, without_password(value) if allowed.secret else value, allowed)
            if allowed.fact and f"{name}.{key}" not in config.given:
                shown[-1] = f"# {shown[-1]}"  # read back, a default must not count as given
            lines += shown
        lines.append("")
    for kind_name, table in TABLES.items():
        lines += [f"# {line}" for line in _template(table)]
        for name, entry in getattr(config, kind_name).items():
            lines += ["", f"[{kind_name}.{name}]"]
            lines += [
                f"{shown_key(key)} = {_toml(getattr(entry, key))}"
                for key, _, _ in keys(table)
                if getattr(entry, key) != getattr(table(), key)
            ]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _template(table: type[Table]) -> list[str]:
    """Return the keys of a table that the operator names, with their defaults."""
    lines = [f"[{table.kind}.NAME]", f"# {table.about} NAME: {NAME_WORDS}."]
    for key, _, allowed in keys(table):
        lines += _described(shown_key(key), getattr(table(), key), allowed)
    return lines


def _described(key: str, value: Any, allowed: Allowed) -> list[str]:
    shown = "(absent)" if value is None else _toml(value)
    return [f"# {allowed.about} Allowed: {allowed.text()}.", f"{key} = {shown}"]


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # for these types, JSON and TOML agree


def _refuse_unknown_sections(found: Mapping[str, Any], known: list[str]) -> None:
    sentences = []
    for key, value in found.items():
        if key in known:
            continue
        is_section = isinstance(value, Mapping)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean [{near[0]}]?" if near else f"allowed are {', '.join(sorted(known))}."
        sentences.append(f"Unknown {f'section [{key}]' if is_section else f'key {key}'}: {hint}")
    if sentences:
        raise ConfigError("\n".join(sentences))
