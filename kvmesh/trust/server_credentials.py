"""Server credentials that gRPC reloads at new connections (certificate rotation).

gRPC asks before each handshake. It builds its TLS context anew for each answer, and frees the last context although
another thread's handshake may still take it (grpc/grpc#36693): a use after free, which ends the process. Unchanged
certificates are therefore no answer for REFRESH_S. An answer waits until handshakes that have begun took the last context.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from kvmesh.clock import Clock, MonotonicClock

PAUSE_S: Final = 0.1
"""Time between the last question and an answer. A handshake takes its TLS context some microseconds after its question.

gRPC holds a lock while it asks, so no other handshake begins meanwhile. The danger stays for a thread that gets no CPU for
longer than this.
"""

REFRESH_S: Final = 60.0
"""Longest life of a TLS context while connections come. A client may resume a TLS session of the same context, and then its
certificate is not checked again: one that expired meanwhile is accepted for this time.
"""


@dataclass(frozen=True, slots=True)
class ServerMaterial:
    """Contents of the files of a server, in PEM."""

    key: bytes = field(repr=False)
    certificate: bytes
    client_authority: bytes | None
    """Authorities of client certificates; None: no client shows one."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of one server. `current` returns the files in use; a new value means a renewed certificate."""

    current: Callable[[], ServerMaterial]
    require_client: bool

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one port of one server of grpcio."""
        return reloading_credentials(self.current, require_client=self.require_client)


def reloading_credentials(
    current: Callable[[], ServerMaterial], *, require_client: bool, clock: Clock | None = None
) -> grpc.ServerCredentials:
    """Return credentials for one port of one server, bound once. gRPC calls `current` on threads of its own."""
    source = _Source(current, clock or MonotonicClock())
    return grpc.dynamic_ssl_server_credentials(
        _configuration(source.served), source, require_client_authentication=require_client
    )


class _Source:
    """Returns the configuration if it changed or is REFRESH_S old, and otherwise None: the last one stays."""

    def __init__(self, current: Callable[[], ServerMaterial], clock: Clock) -> None:
        self._current = current
        self._clock = clock
        self._served_s = clock.now_s()
        self._answered_s = float("-inf")
        """End of the last question; its handshake began then."""
        self.served = current()

    def __call__(self) -> Any:
        newest, now_s = self._current(), self._clock.now_s()
        configuration = None
        if newest != self.served or now_s >= self._served_s + REFRESH_S:
            configuration = _configuration(newest)
            time.sleep(max(0.0, self._answered_s + PAUSE_S - now_s))
            self.served, self._served_s = newest, now_s
        self._answered_s = self._clock.now_s()
        return configuration


def _configuration(material: ServerMaterial) -> Any:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], material.client_authority)
