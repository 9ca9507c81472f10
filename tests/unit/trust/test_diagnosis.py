"""The TLS diagnosis leaves no connection behind."""

from __future__ import annotations

import asyncio
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvmesh.trust.diagnosis import explain
from tests.certificates import Folder

END_S_MAX = 5.0


@pytest.mark.parametrize("has_files", [True, False], ids=["with-files", "without"])
def test_the_connection_ends_with_the_diagnosis(tmp_path: Path, has_files: bool) -> None:
    """The same if the peer never answers the end of TLS, like a frozen one, and the loop ends right after the diagnosis."""
    folder = Folder(tmp_path)
    files = folder.files("router")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def shake_hands_and_freeze() -> socket.socket:
            connection, _ = server.accept()
            # The handshake uses another handle of the socket. Later bytes are read without TLS, and never answered.
            # The diagnosis may have finished and closed the connection before this end is done.
            with suppress(OSError), context.wrap_socket(connection.dup(), server_side=True) as tls:
                tls.send(b"x")
            return connection

        peer = thread.submit(shake_hands_and_freeze)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        fault = asyncio.run(
            explain(address, "router.kvmesh.internal", folder.files("frontend") if has_files else None)
        )
        assert fault == ("" if has_files else "the peer uses TLS, but this process has no [trust]")
        with peer.result() as connection:
            connection.settimeout(END_S_MAX)
            with suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
