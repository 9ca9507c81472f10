"""Channels and server credentials between processes of the mesh: plain text, or mutual TLS (mTLS)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc

from kvmesh.config import MeshConfig
from kvmesh.http2.client import LinkTls
from kvmesh.http2.tls import client_context
from kvmesh.roles import CONTROL
from kvmesh.server import BATCHED, channel, link_channel
from kvmesh.trust.diagnosis import explain
from kvmesh.trust.guard import PeerGuard, SameHostGuard
from kvmesh.trust.material import CertificateReloader, Files, Material
from kvmesh.trust.names import FEDERATE, name_of
from kvmesh.trust.server_credentials import ServerMaterial, ServerTls

log = logging.getLogger(__name__)

EXPIRES: Final = "Unix time at which the certificate in use ends; 0 without TLS."

ROLE: Final = "{role}"
"""Placeholder in the paths of [trust] for the role of the reading process, so that one file serves all processes."""


class Trust:
    """Certificate of a process of `role`, and the check of its peers. Without [trust] all peers are trusted.

    Certificates are checked at each full handshake, in both directions. A client that resumes a TLS session is accepted for
    up to a minute after its certificate expired (server_credentials.REFRESH_S). Open connections stay open.
    """

    def __init__(self, config: MeshConfig, role: str) -> None:
        """Read the files. Raises ConfigError with one sentence if files are missing or do not match."""
        self._role = role
        self._mesh = config.mesh.name
        self._is_insecure = config.region.insecure
        self._is_batched = config.mesh.hops == BATCHED
        section = config.trust
        self._reloader: CertificateReloader | None = None
        if section.certificate:
            paths = (section.certificate, section.key, section.authority)
            files = Files(*(path.replace(ROLE, role) for path in paths))
            self._reloader = CertificateReloader(files, name_of(role, self._mesh))
            log.info(
                "peers are verified",
                extra={"as": name_of(role, self._mesh), "expires_s": self._reloader.expires_s},
            )

    def material(self) -> Material | None:
        """Return the certificate, key and authorities in use, or None without TLS."""
        return self._reloader.current() if self._reloader else None

    @property
    def is_on(self) -> bool:
        """True if peers must show a certificate of the mesh."""
        return self._reloader is not None

    def channel(
        self, address: str, role: str, *, message_bytes_max: int = -1, keepalive_s: float = 1.0
    ) -> grpc.aio.Channel:
        """Return a channel to `host:port` that accepts only a process of `role`. The caller closes it.

        `message_bytes_max`: the longest message that the process may send; -1: any. `keepalive_s`: time
        between two pings of a peer with open calls.
        """
        if self._reloader is None:
            return channel(address, message_bytes_max=message_bytes_max, keepalive_s=keepalive_s)
        found = self._reloader.current()
        credentials = grpc.ssl_channel_credentials(found.authority, found.key, found.certificate)
        return channel(
            address,
            credentials,
            name_of(role, self._mesh),
            message_bytes_max=message_bytes_max,
            keepalive_s=keepalive_s,
        )

    def link_channel(self, address: str, role: str) -> grpc.aio.Channel:
        """Return a channel for an Attach link, on the transport of `mesh.hops`. Otherwise as `channel`."""
        if not self._is_batched:
            return self.channel(address, role)
        tls = None
        if self._reloader is not None:
            found = self._reloader.current()
            context = client_context(found.authority, found.key, found.certificate)
            tls = LinkTls(context, name_of(role, self._mesh))
        return link_channel(address, tls)

    def links_to(self, role: str) -> Callable[[str], grpc.aio.Channel]:
        """Return a function that opens channels for Attach links to processes of `role`."""
        return partial(self.link_channel, role=role)

    def channels_to(self, role: str) -> Callable[[str], grpc.aio.Channel]:
        """Return a function that opens channels to processes of `role`."""
        return partial(self.channel, role=role)

    async def explain(self, address: str, role: str) -> str:
        """Return the TLS fault between the process of `role` at `address` and this process, or an empty text."""
        files = self._reloader.files if self._reloader else None
        return await explain(address, name_of(role, self._mesh), files)

    def server_credentials(self) -> ServerTls | None:
        """Return the credentials of the process's server; None: plain text."""
        if self._reloader is None:
            return None
        return ServerTls(self._server_material, require_client=True)

    def guards(self) -> Sequence[grpc.aio.ServerInterceptor[Any, Any]]:
        """Return the interceptors of the process's server."""
        if self.is_on:
            return (PeerGuard(self._role, self._mesh),)
        federates = (FEDERATE,) if self._is_insecure else ()
        return (SameHostGuard(federates),) if self._role == CONTROL else ()

    def expires_s(self) -> float:
        """Return the Unix time at which the certificate in use ends; 0 without one."""
        return self._reloader.expires_s if self._reloader else 0.0

    def _server_material(self) -> ServerMaterial:
        assert self._reloader is not None, "without files there is no certificate"
        found = self._reloader.current()
        return ServerMaterial(found.key, found.certificate, found.authority)
