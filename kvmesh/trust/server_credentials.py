"""Server credentials that gRPC reloads at new connections (certificate rotation).

gRPC asks before each handshake. It builds its TLS context anew for each answer, and frees the last context although
another thread's handshake may still take it (grpc/grpc#36693): a use after free, which ends the process. Unchanged
certificates are therefore no answer, and new ones are given after a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import grpc

PAUSE_S: Final = 0.1
"""Pause before a renewal: time for the handshakes that have begun to take the last TLS context, some microseconds each.

gRPC holds a lock meanwhile, so that no other handshake begins.
"""


class ServerMaterial(NamedTuple):
    """Contents of the files of a server, in PEM."""

    key: bytes
    certificate: bytes
    client_authority: bytes | None
    """Authorities of client certificates; None: no client shows one."""


def reloading_credentials(
    current: Callable[[], ServerMaterial], *, require_client: bool
) -> grpc.ServerCredentials:
    """Return the credentials of one port. `current` returns the newest material; gRPC calls it on threads of its own."""
    source = _Source(current)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(source.served), source, require_client_authentication=require_client
    )


class _Source:
    """Returns a new configuration after each change of the material, and otherwise None: the last one stays."""

    def __init__(self, current: Callable[[], ServerMaterial]) -> None:
        self._current = current
        self.served = current()

    def __call__(self) -> Any:
        newest = self._current()
        if newest == self.served:
            return None
        time.sleep(PAUSE_S)
        self.served = newest
        return _configuration(newest)


def _configuration(material: ServerMaterial) -> Any:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], material.client_authority)
