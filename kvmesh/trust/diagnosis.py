"""Diagnosis of a failed TLS handshake in one sentence. gRPC reports only a closed socket to the caller."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final

from kvmesh.config import ConfigError
from kvmesh.trust.material import Files, client_context, read

HANDSHAKE_S: Final = 1.0
"""Longest handshake. The link that failed makes no attempt before the diagnosis ends."""

_WRONG_NAMES: Final = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


async def explain(address: str, name: str, files: Files | None, setting: str = "[trust]") -> str:
    """Try a handshake with `address`; return the fault between its TLS and that of this process, or an empty text.

    `name`: the expected name in the peer's certificate. `files`: those of this process, or None without TLS. `setting`:
    what gives this process TLS.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await _handshake(host.strip("[]"), int(port), name, files, setting)
    except (OSError, TimeoutError, ValueError, EOFError):
        return ""


async def _handshake(host: str, port: int, name: str, files: Files | None, setting: str) -> str:
    without = f"the peer uses TLS, but this process has no {setting}"
    try:
        context = client_context(files) if files else _unverified_context()
    except ConfigError as error:
        return str(error)
    context.check_hostname = files is not None
    context.set_alpn_protocols(["h2"])
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _WRONG_NAMES:
            return f"the peer's certificate is not for {name}"
        return f"the peer's certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        is_tls = error.reason != "WRONG_VERSION_NUMBER"
        if not files:
            return without if is_tls else ""
        return _refused_ours(files) if is_tls else f"the peer uses plain text, but this process has {setting}"
    try:
        if files is None:
            return without
        # In TLS 1.3 a server refuses the client's certificate after the handshake. A gRPC server closes without a reason.
        with suppress(ssl.SSLError):
            if await reader.read(1):
                return ""
        return _refused_ours(files)
    finally:
        # An orderly TLS shutdown would wait for the peer's, up to 30 s and beyond the end of the event loop.
        writer.transport.abort()


def _unverified_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only detects whether the peer uses TLS; nothing is sent
    return context


def _refused_ours(files: Files) -> str:
    if not files.certificate:
        return f"the peer demands a certificate, and this process has no {files.name_of('certificate')}"
    if not files.signs_own:
        return "the peer refuses the certificate of this process: it has expired, or the peer trusts another authority"
    try:
        read(files)
    except ConfigError as error:
        return f"the peer refuses the certificate of this process: {error}"
    return "the peer refuses the certificate of this process: the peer trusts another authority, or its clock is wrong"
