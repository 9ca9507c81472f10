"""The command line for certificates and passwords."""

from __future__ import annotations

import asyncio
import stat
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.cli.main import main
from kvmesh.cli.mesh_file import MESH_FILE, MeshFile, write_mesh
from kvmesh.cli.processes import processes_of
from kvmesh.cli.up import up
from kvmesh.config import ConfigError, build, parse
from kvmesh.redis_url import VARIABLE
from kvmesh.trust.names import CERTIFICATE_ROLES
from kvmesh.trust.peers import ROLE, Trust
from tests.certificates import Folder

URL = "redis://mesh:s3cret@redis.example:6379/0"


def run(*words: str) -> int:
    """Run `kvmesh` and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_the_output_of_certificates_is_a_working_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commands suffice: this one, and `kvmesh up` with its output. Only the owner can read the keys."""
    assert run("certificates", str(tmp_path / "certs")) == 0
    config = parse(capsys.readouterr().out)
    for role in CERTIFICATE_ROLES:
        assert Trust(config, role).is_on
        assert stat.S_IMODE((tmp_path / "certs" / f"{role}.key").stat().st_mode) == 0o600
    authority = (tmp_path / "certs" / "authority.pem").read_bytes()
    before = (tmp_path / "certs" / "router.pem").read_bytes()
    assert run("certificates", str(tmp_path / "certs"), "--roles", "router,decode", "--days", "2") == 0
    assert (tmp_path / "certs" / "authority.pem").read_bytes() == authority
    assert (tmp_path / "certs" / "router.pem").read_bytes() != before
    assert Trust(config, "router").expires_s() < Trust(config, "prefill").expires_s()


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--roles", "router,pilot"), '--roles names "pilot": allowed are frontend, router'),
        (("--days", "0"), "--days = 0 is out of range: allowed are 1 to 825 days."),
    ],
)
def test_impossible_certificates_are_refused_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], output: str
) -> None:
    """The status is 2, and nothing is written."""
    assert run("certificates", str(tmp_path / "certs"), *words) == 2
    assert output in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_an_authority_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files stay as they are."""
    (tmp_path / "authority.key").write_text("no key")
    (tmp_path / "authority.pem").write_text("no certificate")
    assert run("certificates", str(tmp_path)) == 2
    assert "authority.pem, authority.key) cannot be used" in capsys.readouterr().err
    assert (tmp_path / "authority.key").read_text() == "no key"


def test_a_mesh_with_wrong_certificates_does_not_start(tmp_path: Path) -> None:
    """The error comes before any process starts, and not from a process into its log."""
    folder = Folder(tmp_path / "certs")
    folder.expire("decode")
    config = build({"trust": folder.section(), "engine": {"arithmetic": "hashed"}})
    with pytest.raises(ConfigError, match=r"decode\.pem.*expired"):
        asyncio.run(up(config, tmp_path / "data", Console(quiet=True)))


def test_a_command_in_a_pod_of_the_control_plane_needs_no_certificate_of_the_frontends(
    tmp_path: Path,
) -> None:
    """All pods have one configuration, and each has the key of its own role alone."""
    frontend = {"certificate": str(tmp_path / "none.pem"), "key": str(tmp_path / "none.key")}
    certificates = {key: path.replace(ROLE, "control") for key, path in Folder(tmp_path).section().items()}
    config = build({"trust": certificates, "frontend": frontend})
    ControlClient(FoundMesh(config, "", None), ["127.0.0.1:7000"])


def test_a_password_goes_to_processes_in_their_environment(tmp_path: Path) -> None:
    """Every user of the machine can read arguments."""
    for process in processes_of(build({"redis": {"url": URL}}), tmp_path / "kvmesh.toml", tmp_path):
        assert not any("s3cret" in word for word in process.command)
        expected = () if process.role == "engine" else ((VARIABLE, URL),)
        assert process.environment == expected
    plain = processes_of(
        build({"redis": {"url": "redis://redis.example"}}), tmp_path / "kvmesh.toml", tmp_path
    )
    assert all("--redis" in process.command for process in plain if process.role != "engine")


def test_only_the_owner_can_read_mesh_json(tmp_path: Path) -> None:
    """`kvmesh status` alone needs the password of the operator's Redis."""
    write_mesh(tmp_path, MeshFile(pid=1, config="", processes=()))
    write_mesh(tmp_path, MeshFile(pid=2, config="", processes=()))
    assert stat.S_IMODE((tmp_path / MESH_FILE).stat().st_mode) == 0o600


def test_the_printed_configuration_has_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of `kvmesh config` is pasted into tickets."""
    path = tmp_path / "kvmesh.toml"
    path.write_text(f'[redis]\nurl = "{URL}"\n')
    assert run("config", "--config", str(path)) == 0
    shown = capsys.readouterr().out
    assert "s3cret" not in shown and tomllib.loads(shown)["redis"]["url"].endswith("@redis.example:6379/0")


FILES = ("--authority", "ca.pem", "--certificate", "a.pem", "--private-key", "a.key")
NO_AUTHORITY = "needs --authority FILE, the authority of the frontend's certificate."


@pytest.mark.parametrize("command", ["generate", "models"])
@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--authority", "nofile"), '--authority = "nofile" cannot be read: No such file or directory.'),
        (("--authority", "."), '--authority = "." cannot be read: Is a directory.'),
        (
            ("--authority", "junk"),
            '--authority = "junk" cannot be used: allowed is a PEM file with certificates.',
        ),
        (
            (*FILES, "--certificate", "nofile"),
            '--certificate = "nofile" cannot be read: No such file or directory.',
        ),
        (
            (*FILES, "--private-key", "nofile"),
            '--private-key = "nofile" cannot be read: No such file or directory.',
        ),
        (
            (*FILES, "--private-key", "junk"),
            (
                '--certificate = "a.pem" and --private-key = "junk" cannot be used: '
                "allowed are PEM files with a certificate and its key, without a password."
            ),
        ),
        (
            (*FILES, "--private-key", "b.key"),
            '--private-key = "b.key" does not belong to --certificate = "a.pem": allowed is its own key.',
        ),
        (FILES[:4], '--certificate = "a.pem" needs --private-key FILE, its key.'),
        (
            (*FILES[:2], *FILES[4:]),
            '--private-key = "a.key" needs --certificate FILE, the certificate of the key.',
        ),
        (FILES[2:], f'--certificate = "a.pem" {NO_AUTHORITY}'),
        (("--private-key", "a.key"), f'--private-key = "a.key" {NO_AUTHORITY}'),
        (("--server-name", "a.example"), f'--server-name = "a.example" {NO_AUTHORITY}'),
        *(
            (
                (*FILES, "--server-name", name),
                f'--server-name = "{name}" is no name: allowed is a DNS name or an IP address, without a port.',
            )
            for name in ("a.example:7000", "https://a.example", ".", "a..b", "a b", "*.a.example", "a" * 64)
        ),
    ],
)
def test_unusable_options_of_tls_are_named(
    command: str,
    words: tuple[str, ...],
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One sentence with the option, and status 2, before any call."""
    monkeypatch.chdir(tmp_path)
    for path, mesh in (("mesh", "kvmesh"), ("other", "other")):
        Folder(tmp_path / path, mesh, ["router", "frontend"])
    for name, source in {
        "ca.pem": "mesh/authority.pem",
        "a.pem": "other/router.pem",
        "a.key": "other/router.key",
        "b.key": "other/frontend.key",
    }.items():
        (tmp_path / name).write_bytes((tmp_path / source).read_bytes())
    (tmp_path / "junk").write_bytes(b"\xff no PEM")
    prompt = ("x",) if command == "generate" else ()
    assert run(command, *prompt, "--address", "127.0.0.1:1", *words) == 2
    assert capfd.readouterr().err == f"{output}\n"


@pytest.mark.parametrize("command", ["generate", "models"])
def test_an_authority_needs_an_address(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The running mesh of the folder has certificates of its own."""
    prompt = ("x",) if command == "generate" else ()
    assert run(command, *prompt, "--authority", "nofile") == 2
    assert capsys.readouterr().err == (
        '--authority = "nofile" needs --address HOST:PORT, a frontend with a certificate signed by it.\n'
    )
