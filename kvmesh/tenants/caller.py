"""The caller of a request: its tenant, service class and account, as the result of identification. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.buckets.limits import Account, Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """Limits of all requests of a class. Times in seconds."""

    name: str
    priority_class: int = 4
    """0 to 7; waiting requests of a higher class are released first."""
    runtime_max_s: float
    """Maximum runtime: a request that reaches it ends with its tokens and finish reason DEADLINE, or fails without any."""
    default_deadline_s: float
    """Deadline of a request without one; at most `runtime_max_s`."""
    max_output_tokens: int
    """Largest output limit of a request."""
    is_sheddable: bool = False
    kv_headroom: float = 0.0
    """Share of a decode replica's KV blocks that must stay free beside a request. 0 to 0.9."""


NO_LIMIT: Final = Limit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant, with its defaults resolved."""

    name: str
    """Empty: the anonymous tenant of a mesh without tenants."""
    organisation: str = ""
    service_class: str = "standard"
    weight: float = 1.0
    """Weight in weighted fair queuing inside its priority class, relative to other tenants."""
    limit: Limit = NO_LIMIT
    is_strict: bool = False
    """True: each request reserves the most that it may use, and never overruns."""
    may_clamp: bool = True
    """True: an output limit beyond the client's deadline is lowered, and `started` reports the new limit."""
    cached_discount: float = 0.5
    """Discount on a prompt's cached tokens: the share that is not charged. 0 to 1."""
    is_disabled: bool = False
    regions: tuple[str, ...] = ()
    """Regions that may see its requests (data residency). Empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One caller: the tenant that pays, its service class, and the account that is charged."""

    tenant: Tenant
    service_class: ServiceClass
    account: Account
    """Without scopes nothing is limited, and no budget is needed."""
    key: str = ""
    """Name of the API key; empty: another credential, or none."""
