"""Authentication of the caller, from a call's metadata and the certificate of its connection. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.call import CallHead
from kvmesh.errors import MeshError
from kvmesh.tenants.caller import Caller
from kvmesh.tenants.catalogue import HEADER, Catalogue

AUTHORIZATION: Final = "authorization"
SCHEME: Final = "bearer"
"""RFC 6750; names of schemes are case-insensitive (RFC 9110, 11.1)."""


def identify(call: CallHead, catalogue: Catalogue) -> Caller:
    """Return the caller of `call`.

    Raises MeshError CREDENTIALS_MISSING, CREDENTIALS_UNKNOWN, TENANT_UNKNOWN, TENANT_DISABLED.
    """
    if not catalogue.requires_credentials:
        return catalogue.identify(None, (), None)
    metadata = call.metadata
    given = metadata.get(AUTHORIZATION)
    bearer = None if given is None else _bearer(given)
    # A key takes precedence over a certificate. The check of a key takes less CPU than the check of a certificate.
    identities = call.identities if bearer is None else ()
    return catalogue.identify(bearer, identities, metadata.get(HEADER))


def _bearer(given: str) -> str:
    """Return the API key in the value of `authorization`. Raises MeshError, which does not quote the value."""
    scheme, _, key = given.partition(" ")
    key = key.strip()
    if scheme.lower() != SCHEME or not key:
        raise MeshError("CREDENTIALS_UNKNOWN", 'authorization must be "Bearer" and an API key')
    return key
