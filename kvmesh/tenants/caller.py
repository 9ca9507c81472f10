"""Who calls, as everything behind the identification sees it.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.buckets.limits import Account, Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """What all requests of a class may do. Times in seconds."""

    name: str
    priority_class: int = 4
    """0 to 7; who waits in a higher one is released first."""
    runtime_max_s: float
    """A request of the class is cut then, with its tokens and finish reason DEADLINE; never before."""
    default_deadline_s: float
    """Deadline of a request that brings none; at most `runtime_max_s`."""
    max_output_tokens: int
    """Largest limit a request may name."""
    is_sheddable: bool = False
    kv_headroom: float = 0.0
    """Share of a decode replica's KV blocks that must stay free beside a request. 0 to 0.9."""


NO_LIMIT: Final = Limit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant, its defaults resolved."""

    name: str
    """Empty: the anonymous tenant of a mesh without tenants."""
    organisation: str = ""
    service_class: str = "standard"
    weight: float = 1.0
    """Share inside its band, relative to the others'."""
    limit: Limit = NO_LIMIT
    is_strict: bool = False
    """True: the most a request may use is reserved, so that it never overruns."""
    may_clamp: bool = True
    """True: an output limit that the client's deadline leaves no time for is lowered, and the client told."""
    cached_discount: float = 0.5
    """Share of a prompt's cached tokens that is not charged. 0 to 1."""
    is_disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One caller: who pays, and by which rules."""

    tenant: Tenant
    service_class: ServiceClass
    account: Account
    """Without scopes: nothing is limited, and nobody need be asked."""
    key: str = ""
    """Name of the API key; empty: another credential, or none."""
