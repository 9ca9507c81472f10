"""`kvmesh generate` and `kvmesh models` at frontends that demand a client's certificate and carry another name."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.child import bound_command
from tests.certificates import Folder
from tests.integration.harness import configure
from tests.integration.trust.test_mesh import TrustedMesh

pytestmark = pytest.mark.mesh

SERVER_NAME = "api.acme.example"
CLIENT = "search.acme.example"


@pytest.fixture
def clients(tmp_path: Path) -> Folder:
    """The authority of the clients, which is not that of the mesh."""
    made = Folder(tmp_path / "clients", roles=[])
    made.sign(CLIENT)
    made.sign("expired", CLIENT, days=0)
    return made


@pytest.fixture
async def mesh(clients: Folder, tmp_path: Path) -> AsyncIterator[TrustedMesh]:
    """A mesh with a frontend that has a certificate for SERVER_NAME, not for its address."""
    own = Folder(tmp_path / "certificates")
    own.sign("frontend", "frontend.kvmesh.internal", SERVER_NAME)
    frontend = {
        "certificate": own.files("frontend").certificate,
        "key": own.files("frontend").key,
        "client_authority": clients.files(CLIENT).authority,
    }
    made = TrustedMesh(
        configure(engine={"arithmetic": "hashed"}, frontend=frontend, trust=own.section()), tmp_path
    )
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def kvmesh(command: str, *arguments: str) -> tuple[int, str, str]:
    """Run the console script; return its exit status, stdout and stderr."""
    more = ("It was", "--max-output-tokens", "4", "--seed", "7") if command == "generate" else ()
    child = await asyncio.create_subprocess_exec(
        *bound_command([sys.executable, "-m", "kvmesh.cli.main", command, *more, *arguments]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    return child.returncode or 0, out.decode(), err.decode()


async def test_commands_show_a_certificate_and_expect_a_name(
    mesh: TrustedMesh, clients: Folder, tmp_path: Path
) -> None:
    """All four options together are served. Without some of them the command names the fault and ends with 1."""
    address = mesh.parts["frontend-0"].address
    authority = ("--authority", str(tmp_path / "certificates" / "authority.pem"))
    name = ("--server-name", SERVER_NAME)

    def shown(file: str) -> tuple[str, ...]:
        files = clients.files(file)
        return ("--certificate", files.certificate, "--private-key", files.key)

    faults = {
        (): "the peer uses TLS, but this process has no --authority",
        (*authority, *shown(CLIENT)): f"the peer's certificate is not for {address.rpartition(':')[0]}",
        (*authority, *name): "the peer demands a certificate, and this process has no --certificate",
        (
            *authority,
            *name,
            *shown("expired"),
        ): "the peer refuses the certificate of this process: it has expired",
        (
            *("--authority", clients.files(CLIENT).authority),
            *name,
            *shown(CLIENT),
        ): "the peer's certificate is refused: ",
    }
    for command, output in (("generate", "\n"), ("models", "kvmesh")):
        served = await kvmesh(command, "--address", address, *authority, *name, *shown(CLIENT))
        assert served[0] == 0 and output in served[1], served
        for options, fault in faults.items():
            status, _, err = await kvmesh(command, "--address", address, *options)
            assert status == 1 and f"{address}: {fault}" in err, (options, err)
