"""Identification: finds the caller, and so the paying tenant and its rules, from the credentials of a call.

Pure and immutable: a change of the configuration or of an operator's overrides makes a new Catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from kvmesh.buckets.limits import Account, Scope
from kvmesh.config import MeshConfig
from kvmesh.errors import MeshError
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from kvmesh.tenants.overrides import Override, Tables, apply
from kvmesh.tenants.sections import STANDARD, ClassTable, KeyTable, TenantTable

HEADER: Final = "kvmesh-tenant"
"""Metadata key with the tenant that a gateway calls for."""

NO_OVERRIDES: Final[Mapping[str, Override]] = {}


@dataclass(frozen=True, slots=True)
class _Credential:
    """The caller behind one API key or one name in a certificate."""

    caller: Caller
    is_gateway: bool = False
    is_disabled: bool = False
    """True if the key itself is disabled; a tenant has a flag of its own."""


class Catalogue:
    """All tenants with their classes and credentials.

    A key is looked up by its SHA-256 in a table of hashes. The lookup needs no constant-time comparison: its duration
    reveals bits of a hash, and no attacker can find a key for a given hash. The hash needs neither a salt nor a slow
    function: a key of `kvmesh tenants key` has 256 random bits and cannot be guessed.
    """

    def __init__(
        self, config: MeshConfig, overrides: Mapping[str, Override] = NO_OVERRIDES, share: float = 1.0
    ) -> None:
        """`share`: part of all limits that the region of this process enforces, above 0 and at most 1."""
        self._share = share
        tables, problems = apply(tables_of(config), overrides)
        self.tables = tables
        """Tables of the configuration, with the overrides applied."""
        self.problems: tuple[str, ...] = tuple(problems)
        """One sentence for each override that is left out."""
        self.classes = classes_of(config)
        self._callers = {name: self._caller(name, tenant) for name, tenant in tables.tenants.items()}
        self._by_digest: dict[bytes, _Credential] = {
            bytes.fromhex(key.sha256): _Credential(
                self._caller(key.tenant, tables.tenants[key.tenant], name, key), key.gateway, key.disabled
            )
            for name, key in tables.keys.items()
        }
        self._by_identity: dict[str, _Credential] = {}
        for name, tenant in tables.tenants.items():
            for identity in tenant.identities:
                self._by_identity[identity] = _Credential(self._callers[name])
            for identity in tenant.gateway_identities:
                self._by_identity[identity] = _Credential(self._callers[name], is_gateway=True)
        self._anonymous: _Credential | None = None
        if config.frontend.anonymous_tenant:
            self._anonymous = _Credential(self._callers[config.frontend.anonymous_tenant])
        self._open_caller: Caller | None = None
        if not tables.tenants:
            self._open_caller = Caller(
                tenant=Tenant(name=""), service_class=self.classes[STANDARD], account=Account("", ())
            )

    def identify(self, bearer: str | None, identities: Sequence[str], named: str | None) -> Caller:
        """Return the caller with these credentials.

        `bearer` is an API key, `identities` the names in a verified client certificate, `named` the tenant that a gateway
        names. A key precedes a certificate. In a mesh without tenants every caller is the anonymous tenant, with any
        credentials. Raises MeshError CREDENTIALS_MISSING, CREDENTIALS_UNKNOWN, TENANT_UNKNOWN or TENANT_DISABLED. No error
        quotes a key.
        """
        if self._open_caller is not None:
            return self._open_caller
        credential = self._credential(bearer, identities)
        if credential.is_disabled:
            raise _disabled("key", credential.caller.key)
        caller = credential.caller
        if named is not None and named != caller.tenant.name:
            # The error is the same for existing and unknown tenants, so that a caller cannot probe for names.
            if not credential.is_gateway:
                raise MeshError(
                    "TENANT_UNKNOWN", f"only a gateway may name another tenant than its own in {HEADER}"
                )
            if caller.tenant.is_disabled:
                raise _disabled("tenant", caller.tenant.name)
            found = self._callers.get(named)
            if found is None:
                raise MeshError("TENANT_UNKNOWN", f"the tenant in {HEADER} does not exist")
            caller = found
        if caller.tenant.is_disabled:
            raise _disabled("tenant", caller.tenant.name)
        return caller

    @property
    def requires_credentials(self) -> bool:
        """True if callers must show credentials; a mesh without tenants needs none."""
        return self._open_caller is None

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants, in the order of the configuration; empty in a mesh without tenants."""
        return [caller.tenant for caller in self._callers.values()]

    def caller(self, tenant: str) -> Caller | None:
        """Return the tenant as a caller without a key, or None for an unknown name."""
        return self._callers.get(tenant)

    def _credential(self, bearer: str | None, identities: Sequence[str]) -> _Credential:
        if bearer is not None:
            known = self._by_digest.get(digest(bearer))
            if known is None:
                raise MeshError("CREDENTIALS_UNKNOWN", "the API key is unknown")
            return known
        for identity in identities:
            known = self._by_identity.get(identity)
            if known is not None:
                return known
        if self._anonymous is not None:
            return self._anonymous
        if identities:
            raise MeshError("CREDENTIALS_UNKNOWN", "no tenant has a name of the client's certificate")
        raise MeshError(
            "CREDENTIALS_MISSING", 'credentials are missing: send an API key as "authorization: Bearer KEY"'
        )

    def _caller(
        self, name: str, tenant: TenantTable, key_name: str = "", key: KeyTable | None = None
    ) -> Caller:
        organisation = tenant.organisation or name
        above = self.tables.organisations.get(organisation)
        limits = [(f"organisation:{organisation}", above.limit())] if above is not None else []
        limits.append((f"tenant:{name}", tenant.limit()))
        if key is not None:
            limits.append((f"key:{key_name}", key.limit()))
        return Caller(
            tenant=Tenant(
                name=name,
                organisation=organisation,
                service_class=tenant.class_,
                weight=tenant.weight,
                limit=tenant.limit(),
                is_strict=tenant.strict,
                may_clamp=tenant.clamp,
                cached_discount=tenant.cached_discount,
                is_disabled=tenant.disabled,
                regions=tuple(tenant.regions),
            ),
            service_class=self.classes[tenant.class_],
            account=Account(
                organisation,
                tuple(
                    Scope(scope, limit.scaled(self._share)) for scope, limit in limits if not limit.is_none
                ),
            ),
            key=key_name,
        )


def digest(key: str) -> bytes:
    """Return the hash of an API key that the mesh keeps: SHA-256, 32 bytes."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def tables_of(config: MeshConfig) -> Tables:
    """Return the tables of the configuration, without overrides."""
    return Tables(
        classes=config.classes,
        organisations=config.organisations,
        tenants=config.tenants,
        keys=config.keys,
    )


def classes_of(config: MeshConfig) -> dict[str, ServiceClass]:
    """Return all classes by name, with defaults resolved; `standard` always exists."""
    tables = {STANDARD: ClassTable(), **config.classes}
    return {name: _class_of(name, table, config) for name, table in tables.items()}


def _class_of(name: str, table: ClassTable, config: MeshConfig) -> ServiceClass:
    frontend = config.frontend
    runtime_max_s = table.runtime_max_s or frontend.runtime_max_s
    return ServiceClass(
        name=name,
        priority_class=table.priority_class,
        runtime_max_s=runtime_max_s,
        default_deadline_s=min(table.default_deadline_s or frontend.default_deadline_s, runtime_max_s),
        max_output_tokens=table.max_output_tokens or frontend.max_output_tokens_max,
        is_sheddable=table.sheddable,
        kv_headroom=table.kv_headroom,
    )


def _disabled(what: str, name: str) -> MeshError:
    return MeshError("TENANT_DISABLED", f"the {what} {name} is disabled", metadata={what: name})
