"""Certificates are renewed while many clients connect at once: no connection fails, and the process lives."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvmesh.config import ROOT
from kvmesh.trust.material import client_context
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


@pytest.mark.timeout(120)
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
        shown: set[bytes] = set()
        for _ in range(RENEWALS):
            running = [clients.submit(connect, folder, address) for _ in range(CLIENTS)]
            folder.renew("router")
            for each in running:
                shown |= each.result()
        assert server.poll() is None
        newest = ssl.PEM_cert_to_DER_cert((folder.path / "router.pem").read_text())
        assert connect(folder, address) == {newest}
        assert len(shown) > 2, "certificates were not renewed while clients connected"
        server.stdin.close()
        assert server.wait(20) == 0
