"""TLS of the HTTP server: hostile handshakes, client certificates, renewed certificates."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvmesh.http1 import ending
from kvmesh.http1.connection import IDENTITIES, NAMES
from kvmesh.trust.server_credentials import ServerMaterial, ServerTls
from tests.certificates import Folder
from tests.patience import wait_for
from tests.raw_http1 import BOUND_S, Client, get
from tests.unit.http1.site import Serving, serving, until

HELLO = bytes.fromhex("1603010200010001fc0303")
"""The start of a TLS handshake."""


@dataclass
class Authority:
    """Certificates of a server and of a client, and the server's TLS."""

    folder: Folder
    tls: ServerTls

    def context(self, *, shows_certificate: bool = True) -> ssl.SSLContext:
        """Return the TLS context of a client."""
        files = self.folder.files("router")
        context = ssl.create_default_context(cafile=files.authority)
        context.check_hostname = False
        if shows_certificate:
            context.load_cert_chain(files.certificate, files.key)
        return context

    async def connect(self, made: Serving, data: bytes = b"", *, shows_certificate: bool = True) -> Client:
        """Return a client that has sent `data`, with its handshake done."""
        host, _, port = made.server.address.rpartition(":")
        context = self.context(shows_certificate=shows_certificate)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        client = Client(reader, writer)
        made.clients.append(client)
        client.send(data)
        return client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The certificates, made once."""
    return Folder(tmp_path_factory.mktemp("certificates"), roles=["frontend", "router"])


@pytest.fixture
def authority(folder: Folder) -> Authority:
    """A server that demands certificates."""
    files = folder.files("frontend")

    def current() -> ServerMaterial:
        return ServerMaterial(
            key=Path(files.key).read_bytes(),
            certificate=Path(files.certificate).read_bytes(),
            client_authority=Path(files.authority).read_bytes(),
        )

    return Authority(folder, ServerTls(current, require_client=True))


async def served(made: Serving, authority: Authority) -> None:
    """Check that another client is served."""
    client = await authority.connect(made, get("/here"))
    await client.until(b"\r\n\r\n/here")


@pytest.mark.parametrize("data", [b"", HELLO[:3], HELLO, HELLO + bytes(200)])
async def test_a_handshake_that_never_ends_is_cut(authority: Authority, data: bytes) -> None:
    async with serving(authority.tls, handshake_s=0.05) as made:
        client = await made.connect(data)
        assert await client.closed() == b""
        await served(made, authority)


@pytest.mark.parametrize("data", [get("/"), b"\0" * 300, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_what_is_no_tls_is_closed(authority: Authority, data: bytes) -> None:
    async with serving(authority.tls) as made:
        client = await made.connect(data)
        assert b"HTTP" not in await client.closed()
        assert not made.site.paths
        await served(made, authority)


async def test_unfinished_handshakes_do_not_keep_others_out(authority: Authority) -> None:
    """At the limit the longest of them is cut."""
    async with serving(authority.tls, connections_max=3) as made:
        waiting = [await made.connect(HELLO) for _ in range(3)]
        listener = made.server._listener
        assert listener is not None
        await until(lambda: listener.arriving == 3)
        await served(made, authority)
        assert await waiting[0].closed() == b""
        assert listener.arriving == 2


async def test_an_unfinished_handshake_does_not_delay_a_stop(authority: Authority) -> None:
    async with serving(authority.tls, handshake_s=60.0) as made:
        client = await made.connect(HELLO)
        listener = made.server._listener
        assert listener is not None
        await until(lambda: listener.arriving == 1)
        await wait_for(made.server.stop(), BOUND_S)
        assert await client.closed() == b""


async def test_a_client_without_a_certificate_is_refused(authority: Authority) -> None:
    async with serving(authority.tls) as made:
        # A client of TLS 1.3 hears of it after its own part of the handshake.
        with suppress(OSError):
            client = await authority.connect(made, get("/"), shows_certificate=False)
            assert await client.rest() == b""
        assert not made.site.paths
        await served(made, authority)


async def test_names_of_the_certificate_reach_the_application(authority: Authority) -> None:
    async with serving(authority.tls) as made:
        client = await authority.connect(made, get("/names"))
        await client.until(b"\r\n\r\n/names")
        assert made.site.names[IDENTITIES] == {NAMES: ["router.kvmesh.internal"]}


async def test_a_renewed_certificate_is_shown_to_new_connections(authority: Authority) -> None:
    async with serving(authority.tls) as made:
        before = await authority.connect(made, get("/a"))
        await before.until(b"\r\n\r\n/a")
        authority.folder.renew("frontend")
        after = await authority.connect(made, get("/b"))
        await after.until(b"\r\n\r\n/b")
        shown = [
            each.writer.get_extra_info("ssl_object").getpeercert(binary_form=True) for each in (before, after)
        ]
        assert shown[0] != shown[1]
        before.send(get("/c"))
        await before.until(b"\r\n\r\n/c")


async def test_a_refusal_reaches_its_client_over_tls(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "LINGER_S", 0.1)
    async with serving(authority.tls) as made:
        client = await authority.connect(made, b"GET /" + b"a" * 200_000)
        assert await client.error() == (431, "HEADERS_TOO_LARGE")
