"""Why a peer cannot be attached to, in a sentence. gRPC tells one end of a failed handshake only that a socket closed."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final

from kvmesh.config import ConfigError
from kvmesh.trust.material import Files, client_context

LOOK_S: Final = 1.0
"""Longest look; who asks is about to wait before the next attempt anyway."""

_WRONG_NAME: Final = 62
"""X509_V_ERR_HOSTNAME_MISMATCH."""


async def explain(address: str, name: str, files: Files | None) -> str:
    """Shake hands with `address` by hand; return what is wrong between its TLS and ours, or an empty text.

    `name`: who should be there. `files`: ours, or None without TLS.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_S):
            return await _look(host.strip("[]"), int(port), name, files)
    except (OSError, TimeoutError, ValueError, EOFError):
        return ""


async def _look(host: str, port: int, name: str, files: Files | None) -> str:
    try:
        context = client_context(files) if files else _believing()
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
        if not files:
            return "TLS is spoken there, and this process has no [trust]" if _is_tls(error) else ""
        return (
            f"{_words(error)} there, and this process has [trust]" if not _is_tls(error) else _refused(error)
        )
    try:
        if not files:
            return "TLS is spoken there, and this process has no [trust]"
        # A server that refuses our certificate says so after the handshake (TLS 1.3).
        await reader.read(1)
    except ssl.SSLError as error:
        return _refused(error)
    finally:
        with suppress(Exception):
            writer.close()
    return ""


def _believing() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only to see whether TLS is spoken at all; nothing is sent
    return context


def _is_tls(error: ssl.SSLError) -> bool:
    return error.reason != "WRONG_VERSION_NUMBER"


def _words(error: ssl.SSLError) -> str:
    return "no TLS is spoken" if error.reason == "WRONG_VERSION_NUMBER" else str(error.reason)


def _refused(error: ssl.SSLError) -> str:
    said = (error.reason or "no reason given").lower().replace("_", " ")
    return f"our certificate is refused there: {said}"
