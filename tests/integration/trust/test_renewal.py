"""Certificates are renewed while many clients connect at once: no connection fails, and the process lives."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from kvmesh.clock import VirtualClock
from kvmesh.config import ROOT
from kvmesh.trust.material import client_context
from kvmesh.trust.server_credentials import REFRESH_S, ServerMaterial, reloading_credentials
from tests.certificates import Folder

CLIENTS = 16
CONNECTIONS = 40
"""Connections of each client, one after another, between two renewals."""
RENEWALS = 4


def connect(folder: Folder, address: str) -> set[bytes]:
    """Connect CONNECTIONS times; return the certificates that the server showed, DER."""
    host, _, port = address.rpartition(":")
    context = client_context(folder.files("frontend"))
    context.set_alpn_protocols(["h2"])
    shown = set()
    for _ in range(CONNECTIONS):
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            context.wrap_socket(plain) as secure,
        ):
            shown.add(secure.getpeercert(binary_form=True) or b"")
    return shown


def test_connections_at_once_during_renewals_end_no_process(tmp_path: Path) -> None:
    """gRPC frees the TLS context of a server at a renewal, although another handshake may be about to take it."""
    folder = Folder(tmp_path / "certificates")
    command = [sys.executable, "-m", "tests.integration.trust.server_process", json.dumps(folder.section())]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as server,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        assert server.stdin is not None and server.stdout is not None
        address = server.stdout.readline().strip()
        most = 0
        for _ in range(RENEWALS):
            running = [clients.submit(connect, folder, address) for _ in range(CLIENTS)]
            folder.renew("router")
            most = max(most, *(len(each.result()) for each in running))
        assert server.poll() is None
        newest = ssl.PEM_cert_to_DER_cert((folder.path / "router.pem").read_text())
        assert connect(folder, address) == {newest}
        assert most > 1, "no certificate was renewed while clients connected"
        server.stdin.close()
        assert server.wait(20) == 0


async def test_a_tls_session_is_resumed_for_a_minute_at_most(tmp_path: Path) -> None:
    """A resumed session checks no certificate again, so it must not outlive the client's certificate by much."""
    folder, clock = Folder(tmp_path / "certificates"), VirtualClock()
    files = folder.files("router")

    def material() -> ServerMaterial:
        certificate, key, authority = files.read()
        return ServerMaterial(key, certificate, authority)

    server = grpc.aio.server()
    credentials = reloading_credentials(material, require_client=True, clock=clock)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    context = client_context(folder.files("frontend"))
    context.set_alpn_protocols(["h2"])

    def is_resumed(session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
            context.wrap_socket(plain, session=session) as secure,
        ):
            secure.recv(1)  # the session's ticket comes with the first bytes of HTTP/2
            return secure.session_reused is True, secure.session

    try:
        _, session = await asyncio.to_thread(is_resumed, None)
        assert (await asyncio.to_thread(is_resumed, session))[0], (
            "no session to resume: the test would prove nothing"
        )
        clock.advance(REFRESH_S)
        assert not (await asyncio.to_thread(is_resumed, session))[0]
    finally:
        await server.stop(None)
