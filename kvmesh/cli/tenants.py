"""`kvmesh tenants`: tenants, their limits, keys and usage, and changes. Exit status 1: Redis was unavailable."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Scope
from kvmesh.buckets.operations import Show, Shown
from kvmesh.cli import tenant_tables
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.config_keys import refuse_unknown_name
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_url import without_password
from kvmesh.tenants import minting, store
from kvmesh.tenants.caller import Caller
from kvmesh.tenants.catalogue import Catalogue, digest, tables_of
from kvmesh.tenants.overrides import CHANGEABLE, DELETED, Override, changed, parse_changes
from kvmesh.tenants.sections import KeyTable


class TenantAdmin:
    """Context of the commands: the configuration, the links to Redis, and the overrides in Redis."""

    def __init__(self, config: MeshConfig, url: str, budgets_url: str = "") -> None:
        self.config = config
        self.mesh = config.mesh.name
        self.redis = RedisLink(url)
        self.budgets_redis = RedisLink(budgets_url) if budgets_url else self.redis
        self.overrides: dict[str, Override] = {}
        self.catalogue = Catalogue(config)

    async def __aenter__(self) -> TenantAdmin:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.close()
        await self.budgets_redis.close()

    async def read(self) -> None:
        """Read the overrides from Redis; report each unusable one on stderr. Raises RedisUnavailable."""
        self.overrides, problems = await store.read_overrides(self.redis, self.mesh)
        self.catalogue = Catalogue(self.config, self.overrides)
        for problem in (*problems, *self.catalogue.problems):
            _print_error(f"Left out: {problem}")

    async def try_read(self) -> bool:
        """Call `read`; return False if Redis is unavailable. The configuration alone then counts, with a note on stderr."""
        try:
            await self.read()
        except RedisUnavailable as away:
            _print_error(f"Shown is the configuration alone, without overrides and without usage: {away}")
            return False
        return True

    def caller(self, tenant: str) -> Caller:
        """Return the tenant, or raise ConfigError."""
        refuse_unknown_name("NAME", tenant, self.catalogue.tables.tenants)
        caller = self.catalogue.caller(tenant)
        assert caller is not None
        return caller


async def list_all(config: MeshConfig, url: str, *, as_json: bool) -> int:
    """Print one row per tenant; return 1 if Redis was unavailable."""
    async with TenantAdmin(config, url) as admin:
        is_there = await admin.try_read()
        rows = [_tenant(admin, admin.caller(tenant.name)) for tenant in admin.catalogue.tenants]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        _print_error(
            "There are no tenants: the configuration has no [tenants.NAME], and the mesh admits all callers."
        )
    else:
        _print(tenant_tables.tenants_table(rows))
    return 0 if is_there else 1


async def show(config: MeshConfig, url: str, name: str, *, as_json: bool, budgets_url: str = "") -> int:
    """Print one tenant with its keys, or one organisation with its tenants, and the remainder of every limit.

    Returns 1 if Redis was unavailable. Raises ConfigError.
    """
    kind, name = _scope(name)
    if kind == "key":
        raise ConfigError(
            f'NAME = "key:{name}" is not shown by itself: allowed are a tenant, shown with its keys, or organisation:NAME.'
        )
    async with TenantAdmin(config, url, budgets_url) as admin:
        is_there = await admin.try_read()
        if kind == "tenant":
            found, account = _tenant_details(admin, name), admin.caller(name).account
            organisation, scopes = account.organisation, [*account.scopes, *_key_scopes(admin, name)]
        else:
            found, organisation = _organisation(admin, name), name
            scopes = _organisation_scopes(admin, name)
        found["use"], found["ledger"] = None, None
        if is_there:
            try:
                found["use"], found["ledger"] = await _usage(admin, organisation, scopes)
            except RedisUnavailable as away:
                _print_error(f"The usage is not shown: {away}")
                is_there = False
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        table = tenant_tables.tenant_table if kind == "tenant" else tenant_tables.organisation_table
        _print(table(found), *([tenant_tables.usage_table(found["use"])] if found["use"] else []))
    return 0 if is_there else 1


async def change(config: MeshConfig, url: str, name: str, given: Sequence[str], *, as_json: bool) -> int:
    """Write changes of a tenant, an organisation or a key; return 1 if the write failed. Raises ConfigError."""
    kind, name = _scope(name)
    changes = parse_changes(kind, name, given)
    async with TenantAdmin(config, url) as admin:

        def made(before: dict[str, Any]) -> dict[str, Any]:
            before = {} if before == DELETED else before
            after = {key: value for key, value in {**before, **changes}.items() if value is not None}
            changed(tables_of(config), kind, name, after)
            return after

        try:
            await admin.read()
            refuse_unknown_name("NAME", name, admin.catalogue.tables.named(kind))
            override = await store.change(admin.redis, admin.mesh, f"{kind}:{name}", made)
        except (RedisUnavailable, store.Contended) as error:
            _print_error(f"Nothing was changed: {error}")
            return 1
    if as_json:
        written = {"scope": f"{kind}:{name}", "version": override.version, "changes": override.changes}
        print(json.dumps(written, indent=2))
    else:
        summary = ", ".join(
            f"{key} as in the file" if value is None else tenant_tables.change_text(key, value)
            for key, value in changes.items()
        )
        print(f"{kind} {name}: {summary}. Running frontends apply it within two seconds.")
    return 0


async def make_key(
    config: MeshConfig, url: str, tenant: str, key_name: str, *, is_gateway: bool, as_json: bool
) -> int:
    """Make a key of `tenant` and print it; return 1 if its hash could not be written. Raises ConfigError."""
    secret = minting.mint()
    hashed = digest(secret).hex()
    async with TenantAdmin(config, url) as admin:
        try:
            await admin.read()
            admin.caller(tenant)
            key_name = key_name or f"{tenant[:55]}-{hashed[:8]}"
            made = KeyTable(tenant=tenant, sha256=hashed, gateway=is_gateway)
            made.validate(key_name)

            def first(before: dict[str, Any]) -> dict[str, Any]:
                if before not in ({}, DELETED) or key_name in admin.catalogue.tables.keys:
                    raise ConfigError(
                        f'--name = "{key_name}" is taken by another key: allowed is any other name.'
                    )
                return {"tenant": tenant, "sha256": hashed, **({"gateway": True} if is_gateway else {})}

            await store.change(admin.redis, admin.mesh, f"key:{key_name}", first)
        except (RedisUnavailable, store.Contended) as error:
            _print_error(f"No key was made: {error}")
            return 1
    if as_json:
        print(json.dumps({"name": key_name, "tenant": tenant, "key": secret, "sha256": hashed}, indent=2))
        return 0
    gateway = "\ngateway = true" if is_gateway else ""
    _print_error(
        f"Key {key_name} of {tenant} is shown only this once. {without_password(url)} keeps its hash. Frontends on this "
        f"Redis accept the key within two seconds. To keep the key in the configuration as well:\n\n"
        f'[keys.{key_name}]\ntenant = "{tenant}"\nsha256 = "{hashed}"{gateway}\n'
    )
    print(secret)
    return 0


async def delete_key(config: MeshConfig, url: str, tenant: str, key_name: str, *, as_json: bool) -> int:
    """Delete a key that was made while the mesh ran; return 1 if the write failed. Raises ConfigError."""
    if not key_name:
        raise ConfigError("--delete needs --name: the key to delete.")
    async with TenantAdmin(config, url) as admin:
        try:
            await admin.read()
            keys = {key["name"]: key for key in _keys(admin, admin.caller(tenant).tenant.name)}
            if key_name not in keys:
                known = ", ".join(keys) or "none"
                raise ConfigError(f'--name = "{key_name}" is not a key of {tenant}: allowed are {known}.')
            if keys[key_name]["configured"]:
                raise ConfigError(
                    f'--name = "{key_name}" is a key of the configuration: remove [keys.{key_name}] there, and run '
                    f"`kvmesh tenants disable key:{key_name}` to refuse the key until the frontends restart."
                )
            override = await store.change(admin.redis, admin.mesh, f"key:{key_name}", lambda _: dict(DELETED))
        except (RedisUnavailable, store.Contended) as error:
            _print_error(f"No key was deleted: {error}")
            return 1
    if as_json:
        print(json.dumps({"name": key_name, "tenant": tenant, "version": override.version}, indent=2))
    else:
        print(f"Key {key_name} of {tenant} is deleted. Running frontends refuse it within two seconds.")
    return 0


def _scope(name: str) -> tuple[str, str]:
    """Return kind and name of a text such as "search", "tenant:search", "organisation:acme" or "key:search-prod"."""
    kind, sign, rest = name.partition(":")
    if not sign:
        return "tenant", name
    if kind not in CHANGEABLE:
        raise ConfigError(
            f'NAME = "{name}" is unknown: allowed are a tenant, organisation:NAME, tenant:NAME or key:NAME.'
        )
    return kind, rest


def _tenant(admin: TenantAdmin, caller: Caller) -> dict[str, Any]:
    tenant = caller.tenant
    override = admin.overrides.get(f"tenant:{tenant.name}")
    return {
        "name": tenant.name,
        "organisation": tenant.organisation,
        "class": tenant.service_class,
        "weight": tenant.weight,
        "limits": asdict(tenant.limit),
        "strict": tenant.is_strict,
        "clamp": tenant.may_clamp,
        "cached_discount": tenant.cached_discount,
        "disabled": tenant.is_disabled,
        "changed": dict(override.changes) if override else {},
    }


def _tenant_details(admin: TenantAdmin, name: str) -> dict[str, Any]:
    found = _tenant(admin, admin.caller(name))
    tenant = admin.catalogue.tables.tenants[name]
    found["identities"] = list(tenant.identities)
    found["gateway_identities"] = list(tenant.gateway_identities)
    found["keys"] = _keys(admin, name)
    return found


def _organisation(admin: TenantAdmin, name: str) -> dict[str, Any]:
    organisations = admin.catalogue.tables.organisations
    refuse_unknown_name("NAME", name, organisations)
    override = admin.overrides.get(f"organisation:{name}")
    return {
        "name": name,
        "limits": asdict(organisations[name].limit()),
        "tenants": [tenant.name for tenant in admin.catalogue.tenants if tenant.organisation == name],
        "changed": dict(override.changes) if override else {},
    }


def _keys(admin: TenantAdmin, tenant: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "limits": asdict(key.limit()),
            "gateway": key.gateway,
            "disabled": key.disabled,
            "configured": name in admin.config.keys,
        }
        for name, key in admin.catalogue.tables.keys.items()
        if key.tenant == tenant
    ]


def _key_scopes(admin: TenantAdmin, tenant: str) -> list[Scope]:
    """Return the scopes of the tenant's keys that have limits."""
    return [
        Scope(f"key:{name}", key.limit())
        for name, key in admin.catalogue.tables.keys.items()
        if key.tenant == tenant and not key.limit().is_none
    ]


def _organisation_scopes(admin: TenantAdmin, name: str) -> list[Scope]:
    """Return the scopes of the organisation and of its tenants, each once."""
    callers = [admin.caller(tenant.name) for tenant in admin.catalogue.tenants if tenant.organisation == name]
    above = Scope(f"organisation:{name}", admin.catalogue.tables.organisations[name].limit())
    scopes = [] if above.limit.is_none else [above]
    return scopes + [scope for caller in callers for scope in caller.account.scopes if scope != above]


async def _usage(
    admin: TenantAdmin, organisation: str, scopes: Sequence[Scope]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the usage of each scope, and the ledger of the organisation."""
    if not scopes:
        return [], None
    shows = [Show(Account(organisation, (scope,))) for scope in scopes]
    answers = await Ledger(admin.budgets_redis, admin.mesh).run(shows)
    shown = [answer for answer in answers if isinstance(answer, Shown)]
    uses = [
        {**asdict(use), "limits": asdict(scope.limit)}
        for scope, answer in zip(scopes, shown, strict=True)
        for use in answer.uses
    ]
    totals = shown[0].ledger_totals
    return uses, {**asdict(totals), "held": totals.held}


def _print(*tables: Table) -> None:
    console = Console()
    for table in tables:
        console.print(table)


def _print_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")
