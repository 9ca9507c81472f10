"""TLS of one connection over memory buffers. Sans-IO: the connection moves the bytes.

Each connection asks for the certificate in use at that moment, so a renewed one needs no restart. Sessions are not resumed.
A client's certificate is therefore checked at each connection.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvmesh.trust.server_credentials import ServerMaterial, ServerTls

ALPN: Final = "h2"
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers of TLS 1.2 that HTTP/2 allows (RFC 9113, 9.2.2)."""

_RECORD_BYTES: Final = 1 << 16


class TlsFault(Exception):
    """The handshake failed, or the peer broke TLS."""


class TlsEnd:
    """One end of one TLS connection."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool, server_name: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_server, server_hostname=server_name
        )
        self.is_open = False
        """True once the handshake is done."""

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the peer; none starts the handshake. Return plain text. Raises TlsFault.

        Afterwards `take` may have bytes for the peer.
        """
        if data:
            self._incoming.write(data)
        try:
            if not self.is_open:
                self._object.do_handshake()
                self.is_open = True
                if self._object.selected_alpn_protocol() != ALPN:
                    raise TlsFault(f"the peer does not offer {ALPN} in its TLS handshake (ALPN)")
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as error:
            raise TlsFault(str(error)) from None

    def send(self, data: bytes) -> None:
        """Encrypt `data`; `take` has the result."""
        self._object.write(data)

    def take(self) -> bytes:
        """Return the bytes for the peer, and empty the buffer."""
        return self._outgoing.read()

    def peer_names(self) -> Mapping[str, Sequence[bytes]]:
        """Return the names of the peer's certificate as gRPC's auth context has them; empty without one."""
        found: Any = self._object.getpeercert() or {}
        alternative = [value.encode() for _, value in found.get("subjectAltName", ())]
        common = [
            value.encode() for rdn in found.get("subject", ()) for key, value in rdn if key == "commonName"
        ]
        names: dict[str, Sequence[bytes]] = {}
        if alternative:
            names["x509_subject_alternative_name"] = alternative
        if common:
            names["x509_common_name"] = common
        return names

    def _read(self) -> bytes:
        parts = []
        try:
            while True:
                part = self._object.read(_RECORD_BYTES)
                if not part:
                    break
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)


class ServerContexts:
    """Makes the TLS context of new connections. One context serves all of them until the files change."""

    def __init__(self, tls: ServerTls, alpn: str = ALPN) -> None:
        """Build the first context. Raises ssl.SSLError for unusable files. `alpn`: name of the protocol behind TLS."""
        self._tls = tls
        self._alpn = alpn
        self._material = tls.current()
        self._context = server_context(self._material, require_client=tls.require_client, alpn=alpn)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        newest = self._tls.current()
        if newest != self._material:
            self._context = server_context(newest, require_client=self._tls.require_client, alpn=self._alpn)
            self._material = newest
        return self._context


def server_context(material: ServerMaterial, *, require_client: bool, alpn: str = ALPN) -> ssl.SSLContext:
    """Return a server's TLS context. Raises ssl.SSLError for unusable files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    _configure(context, material.certificate, material.key, alpn)
    if material.client_authority:
        context.load_verify_locations(cadata=material.client_authority.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED if require_client else ssl.CERT_NONE
    return context


def client_context(authority: bytes, key: bytes | None, certificate: bytes | None) -> ssl.SSLContext:
    """Return a client's TLS context that trusts `authority` (PEM). Raises ssl.SSLError for unusable files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.decode("ascii"))
    _configure(context, certificate, key, ALPN)
    return context


def _configure(context: ssl.SSLContext, certificate: bytes | None, key: bytes | None, alpn: str) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols([alpn])
    if certificate is not None and key is not None:
        _load_chain(context, certificate + b"\n" + key)


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Load certificates and key from memory. Python's ssl reads files alone, so they pass through an anonymous one."""
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, pem)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
