"""Configuration tables with names that the operator chooses: classes, organisations, tenants, keys. Pure.

Each table is checked by itself and against the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Final

from kvmesh.buckets.limits import Limit
from kvmesh.config_keys import (
    NAME,
    NAME_WORDS,
    Allowed,
    ConfigError,
    Table,
    refuse_unknown_name,
    shown_number,
)
from kvmesh.deadlines import RUNTIME_MAX_S
from kvmesh.tenants.labels import ANONYMOUS, OTHER

STANDARD: Final = "standard"
"""The class of a tenant without one."""

LABELS_TAKEN: Final = (ANONYMOUS, OTHER)
"""Label values of the tenant without a name, and of tenants without a label of their own."""

_SHA256: Final = r"[0-9a-f]{64}"


class ClassTable(Table, frozen=True, kw_only=True):
    kind: ClassVar[str] = "classes"
    about: ClassVar[str] = (
        "Limits and priority of a class of requests. The class `standard` always exists; tenants have it by default."
    )

    priority_class: Annotated[
        int, Allowed("Requests that wait in a higher priority class are released first.", 0, 7)
    ] = 4
    runtime_max_s: Annotated[
        float,
        Allowed(
            "Maximum runtime: a request is cut then, with its tokens; 0 takes frontend.runtime_max_s.",
            0,
            RUNTIME_MAX_S,
            "s",
        ),
    ] = 0.0
    default_deadline_s: Annotated[
        float,
        Allowed(
            "Deadline of a request without one; 0 takes frontend.default_deadline_s, or runtime_max_s if shorter.",
            0,
            RUNTIME_MAX_S,
            "s",
        ),
    ] = 0.0
    max_output_tokens: Annotated[
        int,
        Allowed(
            "Largest output limit of a request; 0 takes frontend.max_output_tokens_max.",
            0,
            1_000_000,
            "tokens",
        ),
    ] = 0
    sheddable: Annotated[
        bool,
        Allowed(
            "Under overload, requests are refused and evicted first (load shedding).", words="true or false"
        ),
    ] = False
    kv_headroom: Annotated[
        float,
        Allowed(
            "Headroom: share of a decode replica's KV blocks that must stay free beside a request.", 0, 0.9
        ),
    ] = 0.0

    def check(self, where: str) -> None:
        for key in ("runtime_max_s", "default_deadline_s"):
            value = getattr(self, key)
            if 0 < value < SHORTEST_S:
                raise ConfigError(
                    f"{where}.{key} = {value:g} is out of range: allowed is 0 or {SHORTEST_S:g} to "
                    f"{shown_number(RUNTIME_MAX_S)} s."
                )


SHORTEST_S: Final = 0.1
"""Shortest runtime and default deadline of a class."""


TOKENS_BURST_MIN: Final = 4096.0
"""Least default of `tokens_burst`, or a minute's tokens if fewer: a small rate must not refuse each ordinary prompt."""


OVERRUN_BURSTS: Final = 2.0
"""Default of the open overrun, in bursts."""


class Limited(Table, frozen=True, kw_only=True):
    """Limits of an organisation, a tenant or a key. A limit holds for all requests inside the scope together."""

    requests_per_min: Annotated[
        float, Allowed("Rate limit: requests per minute; 0: no limit.", 0, 1e9, "requests")
    ] = 0.0
    tokens_per_min: Annotated[
        float, Allowed("Rate limit: tokens per minute; 0: no limit.", 0, 1e12, "tokens")
    ] = 0.0
    concurrency: Annotated[
        int, Allowed("Concurrency limit: running requests; 0: no limit.", 0, 1_000_000, "requests")
    ] = 0
    burst_s: Annotated[
        float,
        Allowed(
            "Size of the token buckets: the amount of this time may come at once after a pause, and at least 1 request.",
            0.1,
            3600,
            "s",
        ),
    ] = 10.0
    tokens_burst: Annotated[
        float,
        Allowed(
            "Tokens that may come at once after a pause; 0 takes the amount of burst_s, but at least 4096 or a minute's "
            "amount, whichever is smaller. A request that needs more is always refused.",
            0,
            1e12,
            "tokens",
        ),
    ] = 0.0
    tokens_overrun: Annotated[
        float,
        Allowed(
            "Limit of the open overrun: tokens that running requests may together still use beyond their reservations; 0 "
            "takes two bursts. Above it requests that may overrun are refused until it shrinks. With no overrun open, "
            "one request is always admitted.",
            0,
            1e12,
            "tokens",
        ),
    ] = 0.0

    def limit(self) -> Limit:
        """Return the limits, with defaults resolved."""
        per_min, tokens = self.requests_per_min, self.tokens_per_min
        tokens_burst = self.tokens_burst or max(tokens / 60 * self.burst_s, min(tokens, TOKENS_BURST_MIN))
        return Limit(
            requests_per_min=per_min,
            requests_burst=max(1.0, per_min / 60 * self.burst_s) if per_min else 0.0,
            tokens_per_min=tokens,
            tokens_burst=tokens_burst if tokens else 0.0,
            concurrency=self.concurrency,
            tokens_overrun=(self.tokens_overrun or OVERRUN_BURSTS * tokens_burst) if tokens else 0.0,
        )

    def check(self, where: str) -> None:
        for key in ("tokens_burst", "tokens_overrun"):
            value = getattr(self, key)
            if value and not self.tokens_per_min:
                raise ConfigError(
                    f"{where}.{key} = {value:g} without {where}.tokens_per_min: "
                    "allowed is 0 without a limit of tokens."
                )


class OrganisationTable(Limited, frozen=True, kw_only=True):
    kind: ClassVar[str] = "organisations"
    about: ClassVar[str] = "Limits that all tenants of an organisation share."


_IDENTITY: Final = Allowed(
    "Names in client certificates of this tenant (needs frontend.client_authority).",
    pattern=r"[\x21-\x7e]{1,255}",
    words="names of 1 to 255 printable characters without spaces",
)


class TenantTable(Limited, frozen=True, kw_only=True):
    kind: ClassVar[str] = "tenants"
    about: ClassVar[str] = (
        "A tenant, which pays for its requests. With the first tenant, callers need credentials."
    )

    organisation: Annotated[
        str,
        Allowed(
            "Organisation of the tenant; empty: an organisation of the tenant's name.",
            pattern=rf"(?:{NAME})?",
            words=f"empty or the NAME of an [organisations.NAME], {NAME_WORDS}",
        ),
    ] = ""
    class_: Annotated[
        str,
        Allowed(
            "Class of the tenant's requests.",
            pattern=NAME,
            words=f"{STANDARD} or the NAME of a [classes.NAME], {NAME_WORDS}",
        ),
    ] = STANDARD
    weight: Annotated[
        float,
        Allowed("Weight in weighted fair queuing with the tenants of the same priority class.", 0.01, 1000),
    ] = 1.0
    strict: Annotated[
        bool,
        Allowed(
            "A request reserves the most that it may use, and never overruns; otherwise it reserves its likely use.",
            words="true or false",
        ),
    ] = False
    clamp: Annotated[
        bool,
        Allowed(
            "An output limit beyond the client's deadline is lowered, and the answer reports the new limit.",
            words="true or false",
        ),
    ] = True
    cached_discount: Annotated[
        float, Allowed("Discount on a prompt's cached tokens: the share that is not charged.", 0, 1)
    ] = 0.5
    identities: Annotated[tuple[str, ...], _IDENTITY] = ()
    gateway_identities: Annotated[
        tuple[str, ...],
        Allowed(
            "Names in certificates of gateways, which may name any tenant in the header kvmesh-tenant.",
            pattern=_IDENTITY.pattern,
            words=_IDENTITY.words,
        ),
    ] = ()
    regions: Annotated[
        tuple[str, ...],
        Allowed(
            "Regions that may see the tenant's requests (data residency); empty: any.",
            words="a list of NAMEs of [regions.NAME]",
        ),
    ] = ()
    disabled: Annotated[bool, Allowed("The tenant's requests are refused.", words="true or false")] = False


def may_be_served_in(tenants: Mapping[str, TenantTable], tenant: str, region: str) -> bool:
    """True if requests of `tenant` may be served in `region` (data residency). An unknown tenant has no table."""
    table = tenants.get(tenant)
    return table is None or not table.regions or region in table.regions


class KeyTable(Limited, frozen=True, kw_only=True):
    kind: ClassVar[str] = "keys"
    about: ClassVar[str] = "An API key of a tenant; `kvmesh tenants key` makes one. Only its hash is kept."

    tenant: Annotated[
        str,
        Allowed(
            "Tenant of the key; required.", pattern=NAME, words=f"the NAME of a [tenants.NAME], {NAME_WORDS}"
        ),
    ] = ""
    sha256: Annotated[
        str,
        Allowed(
            "SHA-256 of the key; required.",
            pattern=_SHA256,
            words="64 of 0-9 and a-f, never the key itself",
            hidden=True,
        ),
    ] = ""
    gateway: Annotated[
        bool,
        Allowed(
            "The key may name any tenant in the header kvmesh-tenant; that tenant pays.",
            words="true or false",
        ),
    ] = False
    disabled: Annotated[bool, Allowed("Requests with the key are refused.", words="true or false")] = False

    def check(self, where: str) -> None:
        super().check(where)
        if self.gateway and not self.limit().is_none:
            raise ConfigError(
                f"{where}.gateway = true beside limits of {where}: allowed are no limits, because the tenants that a "
                "gateway names limit its requests."
            )


TABLES: Final[Mapping[str, type[Table]]] = {
    table.kind: table for table in (ClassTable, OrganisationTable, TenantTable, KeyTable)
}


def validate(
    classes: Mapping[str, ClassTable],
    organisations: Mapping[str, OrganisationTable],
    tenants: Mapping[str, TenantTable],
    keys: Mapping[str, KeyTable],
) -> None:
    """Raise ConfigError if a table is wrong, names an unknown table, or repeats another table's key or identity."""
    given: tuple[Mapping[str, Table], ...] = (classes, organisations, tenants, keys)
    for tables in given:
        for name, table in tables.items():
            table.validate(name)
    for name, tenant in tenants.items():
        if name in LABELS_TAKEN:
            raise ConfigError(
                f'[tenants.{name}] has the name "{name}", which is a label of metrics: allowed is any other name.'
            )
        if tenant.organisation:
            refuse_unknown_name(f"tenants.{name}.organisation", tenant.organisation, organisations)
        refuse_unknown_name(f"tenants.{name}.class", tenant.class_, {STANDARD: None, **classes})
    for name, key in keys.items():
        refuse_unknown_name(f"keys.{name}.tenant", key.tenant, tenants)
    refuse_taken((f"keys.{name}.sha256", key.sha256) for name, key in keys.items())
    refuse_taken(
        (f"tenants.{name}.{key}", identity)
        for name, tenant in tenants.items()
        for key in ("identities", "gateway_identities")
        for identity in getattr(tenant, key)
    )


def refuse_taken(claims: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if two of `claims` (where, value) have one value."""
    owners: dict[str, str] = {}
    for where, value in claims:
        if value in owners:
            raise ConfigError(f'{where} = "{value}" is taken by {owners[value]}: allowed is each value once.')
        owners[value] = where
