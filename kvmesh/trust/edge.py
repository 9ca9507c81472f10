"""TLS and mTLS between clients and a frontend: its certificate, and the authorities of client certificates."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from kvmesh.config import ConfigError, MeshConfig
from kvmesh.server import channel
from kvmesh.trust.material import CertificateReloader, Files, Material
from kvmesh.trust.peers import Trust
from kvmesh.trust.server_credentials import ServerMaterial, ServerTls

log = logging.getLogger(__name__)


class Edge:
    """TLS between a frontend and its clients.

    Without `frontend.certificate` clients use plain text, also if the processes of the mesh use TLS among themselves.
    """

    def __init__(self, config: MeshConfig, trust: Trust) -> None:
        """Read the files. Raises ConfigError."""
        section = config.frontend
        self._trust = trust
        self._reloader: CertificateReloader | None = None
        self._clients: Authorities | None = None
        if section.certificate:
            self._reloader = CertificateReloader(
                Files(section.certificate, section.key, "", section="frontend")
            )
        if section.client_authority:
            self._clients = Authorities(section.client_authority)

    def server_credentials(self) -> ServerTls | None:
        """Return the credentials of the frontend's server; None: plain text."""
        if self._reloader is None:
            return None
        return ServerTls(self._material, require_client=self._clients is not None)

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel from the mesh's own tools to a frontend. It accepts only the frontend's own certificate."""
        if self._reloader is None:
            return channel(address)
        found = self._reloader.current()
        own = self._trust.material() if self._clients else None
        credentials = grpc.ssl_channel_credentials(
            found.certificate, own.key if own else None, own.certificate if own else None
        )
        return channel(address, credentials, found.names[0] if found.names else "")

    def expires_s(self) -> float:
        """Return the Unix time at which the certificate in use ends; 0 without one."""
        return self._reloader.expires_s if self._reloader else 0.0

    def _material(self) -> ServerMaterial:
        assert self._reloader is not None, "a plain edge has no certificate"
        found: Material = self._reloader.current()
        roots = None
        if self._clients is not None:
            own = self._trust.material()
            # Health checks and `kvmesh status` show certificates of the mesh.
            roots = self._clients.current() + b"\n" + (own.authority if own else b"")
        return ServerMaterial(found.key, found.certificate, roots)


class Authorities:
    """Authorities of client certificates, read again for each new connection."""

    def __init__(self, path: str) -> None:
        """Read at once. Raises ConfigError."""
        self._path = path
        self._current = self._read()
        self._last_fault = b""

    def current(self) -> bytes:
        """Return the authorities, PEM. An unusable new file is logged, and the old authorities stay."""
        try:
            self._current = self._read()
        except ConfigError as error:
            if str(error).encode() != self._last_fault:  # logged once
                log.error("renewed authorities cannot be used; the old ones stay in use: %s", error)
            self._last_fault = str(error).encode()
        return self._current

    def _read(self) -> bytes:
        setting = f'frontend.client_authority = "{self._path}"'
        try:
            found = Path(self._path).read_bytes()
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=found.decode("ascii"))
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                raise ConfigError(
                    f"{setting} cannot be used: allowed is a PEM file with certificates."
                ) from error
            raise ConfigError(f"{setting} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ConfigError(
                f"{setting} cannot be used: allowed is a PEM file with certificates."
            ) from error
        return found
