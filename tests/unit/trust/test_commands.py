"""The command line around certificates and passwords."""

from __future__ import annotations

import asyncio
import stat
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli.main import main
from kvmesh.cli.mesh_file import MESH_FILE, MeshFile, write_mesh
from kvmesh.cli.processes import processes_of
from kvmesh.cli.up import up
from kvmesh.config import ConfigError, build, parse
from kvmesh.redis_url import VARIABLE
from kvmesh.trust.names import CERTIFICATE_ROLES
from kvmesh.trust.peers import Trust
from tests.certificates import Folder

URL = "redis://mesh:s3cret@redis.example:6379/0"


def run(*words: str) -> int:
    """Run `kvmesh` and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_what_certificates_prints_is_a_configuration_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commands are enough: this one, and `kvmesh up` with what it printed. Keys are for their owner alone."""
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
    ("words", "said"),
    [
        (("--roles", "router,pilot"), '--roles names "pilot": allowed are frontend, router'),
        (("--days", "0"), "--days = 0 is out of range: allowed are 1 to 825 days."),
    ],
)
def test_impossible_certificates_are_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    """Status 2, and nothing is written."""
    assert run("certificates", str(tmp_path / "certs"), *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_without_openssl_one_sentence_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has certificates needs no openssl."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("certificates", str(tmp_path / "certs")) == 2
    assert capsys.readouterr().err.startswith("The openssl command was not found: install OpenSSL")


def test_a_mesh_with_wrong_certificates_does_not_start(tmp_path: Path) -> None:
    """Said before any process is started, and not by one of them into its log."""
    folder = Folder(tmp_path / "certs")
    folder.expire("decode")
    config = build({"trust": folder.section(), "engine": {"arithmetic": "hashed"}})
    with pytest.raises(ConfigError, match=r"decode\.pem.*expired"):
        asyncio.run(up(config, tmp_path / "data", Console(quiet=True)))


def test_a_password_goes_to_processes_by_their_environment(tmp_path: Path) -> None:
    """Arguments are everybody's to read."""
    for process in processes_of(build({"redis": {"url": URL}}), tmp_path / "kvmesh.toml", tmp_path):
        assert not any("s3cret" in word for word in process.command)
        expected = () if process.role == "engine" else ((VARIABLE, URL),)
        assert process.environment == expected
    plain = processes_of(
        build({"redis": {"url": "redis://redis.example"}}), tmp_path / "kvmesh.toml", tmp_path
    )
    assert all("--redis" in process.command for process in plain if process.role != "engine")


def test_what_tells_where_the_mesh_is_may_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    """`kvmesh status` needs the password of a Redis of the operator's; nobody else does."""
    write_mesh(tmp_path, MeshFile(pid=1, config="", processes=()))
    write_mesh(tmp_path, MeshFile(pid=2, config="", processes=()))
    assert stat.S_IMODE((tmp_path / MESH_FILE).stat().st_mode) == 0o600


def test_the_printed_configuration_has_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvmesh config` is what people paste into tickets."""
    path = tmp_path / "kvmesh.toml"
    path.write_text(f'[redis]\nurl = "{URL}"\n')
    assert run("config", "--config", str(path)) == 0
    shown = capsys.readouterr().out
    assert "s3cret" not in shown and tomllib.loads(shown)["redis"]["url"].endswith("@redis.example:6379/0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--address", "127.0.0.1:1"), '--authority = "nofile" cannot be read: No such file or directory.\n'),
        (
            (),
            '--authority = "nofile" needs --address HOST:PORT, a frontend with a certificate signed by it.\n',
        ),
    ],
)
def test_an_authority_that_cannot_help_is_named(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, status 2."""
    assert run("generate", "--authority", "nofile", *words, "x") == 2
    assert capsys.readouterr().err == said
