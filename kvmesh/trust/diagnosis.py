"""Why a peer cannot be attached to, in a sentence. gRPC tells one end of a failed handshake only that a socket closed."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final

from kvmesh.config import ConfigError
from kvmesh.trust.material import Files, client_context, read

HANDSHAKE_S: Final = 1.0
"""Longest look; who asks is about to wait before the next attempt anyway."""

_WRONG_NAME: Final = 62
"""X509_V_ERR_HOSTNAME_MISMATCH."""


async def explain(address: str, name: str, files: Files | None) -> str:
    """Shake hands with `address` by hand; return what is wrong between its TLS and ours, or an empty text.

    `name`: who should be there. `files`: ours, or None without TLS.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await _handshake(host.strip("[]"), int(port), name, files)
    except (OSError, TimeoutError, ValueError, EOFError):
        return ""


async def _handshake(host: str, port: int, name: str, files: Files | None) -> str:
    try:
        context = client_context(files) if files else _unverified_context()
    except ConfigError as error:
        return str(error)
    context.check_hostname = files is not None
    context.set_alpn_protocols(["h2"])
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _WRONG_NAME:
            return f"the certificate there is not for {name}"
        return f"the certificate there is refused: {error.verify_message}"
    except ssl.SSLError as error:
        is_tls = error.reason != "WRONG_VERSION_NUMBER"
        if not files:
            return "TLS is spoken there, and this process has no [trust]" if is_tls else ""
        return _refused_ours(files) if is_tls else "no TLS is spoken there, and this process has [trust]"
    try:
        if files is None:
            return "TLS is spoken there, and this process has no [trust]"
        # A server that refuses our certificate does so after the handshake (TLS 1.3); gRPC's hangs up without a word.
        with suppress(ssl.SSLError):
            if await reader.read(1):
                return ""
        return _refused_ours(files)
    finally:
        # A polite end of TLS waits for the peer's, up to 30 s and beyond the end of the loop.
        writer.transport.abort()


def _unverified_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only to see whether TLS is spoken at all; nothing is sent
    return context


def _refused_ours(files: Files) -> str:
    try:
        read(files)
    except ConfigError as error:
        return f"our certificate is refused there: {error}"
    return "our certificate is refused there: that process believes another authority, or its clock is wrong"
