"""`kvmesh health`: the process that it asks, and its output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvmesh.cli.certificates import section
from kvmesh.cli.health import Probe, main, probe_of
from kvmesh.cli.main import main as command_line
from kvmesh.cli.mesh_file import ListedProcess, MeshFile, write_mesh
from tests.certificates import Folder

TINI = ["/tini", "--", "/opt/kvmesh/bin/entrypoint"]


@pytest.fixture
def service() -> Iterator[tuple[str, health.HealthServicer]]:
    """A server with only grpc.health.v1, and its address."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None)


def test_a_service_that_serves_is_healthy(
    service: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 while it serves, 1 with one sentence while it drains, and 1 with another one after its end."""
    address, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert main([address]) == 0
    assert capsys.readouterr().out == f"{address} serves.\n"
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main([address]) == 1
    assert capsys.readouterr().err == f"{address} answers, but does not serve now.\n"
    assert main(["127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "127.0.0.1:1 does not answer: UNAVAILABLE.\n"


def test_a_triton_server_without_the_model_is_not_an_engine(
    service: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    """With --model the address must be the address of a Triton server."""
    address, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert main([address, "--model", "tensorrt_llm"]) == 1
    assert "UNIMPLEMENTED" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "probe"),
    [
        (["frontend"], Probe("127.0.0.1:7000", role="frontend")),
        (["router", "--listen", "0.0.0.0:7100"], Probe("127.0.0.1:7100", role="router")),
        (["decode", "--listen=10.9.0.4:7000"], Probe("10.9.0.4:7000", role="decode")),
        (["prefill", "--listen", "[::]:7000"], Probe("[::1]:7000", role="prefill")),
        (["prefill", "--listen", "a:1", "--listen", "b:2"], Probe("b:2", role="prefill")),
        (["router", "--config", "/etc/k.toml"], Probe("127.0.0.1:7000", role="router", config="/etc/k.toml")),
        (["engine", "--arithmetic", "hashed"], Probe("127.0.0.1:9001", "tensorrt_llm")),
        (["engine", "--grpc-port", "8001", "--host", "10.9.0.5"], Probe("10.9.0.5:8001", "tensorrt_llm")),
        (["python", "-c", "pass"], None),
        ([], None),
    ],
)
def test_the_probe_follows_the_command_line_of_the_process(words: list[str], probe: Probe | None) -> None:
    """The last of repeated options counts, as in the process itself."""
    assert probe_of([*TINI, *words]) == probe


def test_a_process_of_no_mesh_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A health check in the wrong container must not look like an unhealthy process."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert main(["--process", str(other.pid)]) == 2
    finally:
        other.kill()
        other.wait()
    assert "is not a process of a mesh" in capsys.readouterr().err
    assert main(["--process", "99999999"]) == 2


@pytest.mark.parametrize(
    "arguments", [[], ["a:1", "--model", "x" * 200], ["a:1", "--config", "k.toml"], ["--role", "router"]]
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and status 2."""
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("address", ["foo", "127.0.0.1:99999", "127.0.0.1:0", ":7000", "::1:7000", "a:b"])
def test_an_impossible_address_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No process is asked. The status is 2, and not 1 as for a process that does not serve."""
    assert main([address]) == 2
    assert f'ADDRESS = "{address}" is not HOST:PORT' in capsys.readouterr().err


def test_an_unknown_role_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence lists the known roles."""
    assert main(["127.0.0.1:1", "--role", "foo"]) == 2
    assert (
        capsys.readouterr().err
        == '--role = "foo" is unknown: allowed are frontend, router, prefill, decode, control, xds.\n'
    )


@pytest.mark.parametrize("words", [("foo",), ("a:1", "--role", "foo"), ("--", "--process")])
def test_a_mistake_is_one_sentence(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The output has no usage of the parser."""
    assert command(*words) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "usage" not in output


def command(*words: str) -> int:
    """Run `kvmesh health`; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        command_line(["health", *words])
    return int(ended.value.code or 0)


def test_the_configuration_of_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with [trust] the role is enough. A wrong role and a dead process have different sentences."""
    folder = Folder(tmp_path / "certs")
    (tmp_path / "kvmesh.toml").write_text(section(folder.path))
    monkeypatch.chdir(tmp_path)
    files = folder.files("router")
    key, certificate, authority = (
        Path(path).read_bytes() for path in (files.key, files.certificate, files.authority)
    )
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        assert command(address, "--role", "router") == 0
        assert command(address, "--role", "decode") == 1
        assert "the peer's certificate is not for decode.kvmesh.internal." in capsys.readouterr().err
        assert command(address) == 1
        assert (
            "the server requires TLS; give --role frontend, router, prefill, decode, control or xds"
            in capsys.readouterr().err
        )
        (tmp_path / ".kvmesh").mkdir()
        member = ListedProcess(name="r", role="router", pid=1, address=address, metrics_address="", log="")
        config = str(tmp_path / "kvmesh.toml")
        write_mesh(tmp_path / ".kvmesh", MeshFile(pid=os.getpid(), config=config, processes=(member,)))
        assert command(address) == 0, "the mesh that runs here knows its role"
        assert command(address.replace("127.0.0.1", "localhost"), "--role", "router") == 0
        for role in ("router", "frontend"):
            Path(folder.files(role).certificate).unlink()
        assert command(address) == 0, "the operator's certificate is enough"
        capsys.readouterr()
        assert command(address, "--role", "frontend") == 1
        assert "but this configuration has no TLS for a frontend" in capsys.readouterr().err
    finally:
        server.stop(None)


def test_a_health_check_imports_little() -> None:
    """The check runs every few seconds beside every process of the mesh."""
    heavy = ("numpy", "typer", "rich", "msgspec", "uvloop", "redis")
    code = f"import sys, kvmesh.cli.health; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
