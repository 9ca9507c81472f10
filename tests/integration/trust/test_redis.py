"""A Redis with users and TLS: the mesh runs on it with the documented rights, and no output shows its password."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.child import bound_command
from kvmesh.redis_binary import redis_binaries
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_script import Script
from kvmesh.redis_url import VARIABLE
from tests.certificates import Folder
from tests.conftest import unused_port
from tests.integration.generation import generate_all, token_request
from tests.integration.harness import Mesh, configure, until
from tests.patience import patience

pytestmark = pytest.mark.mesh

USER, PASSWORD = "mesh", "correct-horse"
SERVICE, SENTINEL_PASSWORD = "mesh-master", "other-horse"

RIGHTS = (
    "~kvmesh:* ~{kvmesh:* resetchannels &kvmesh:* "
    "+@read +@write +@scripting +@pubsub +@connection +@transaction +time -@dangerous"
)
"""The rights of the mesh's user in docs/security.md."""


def _knows_tls(binary: Path) -> bool:
    """Return whether this Redis was built with TLS: a build without TLS rejects the option, a build with TLS ends for
    want of a port.
    """
    command = [str(binary), "--port", "0", "--tls-port", "0"]
    return "Bad directive" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    """URL of a Redis with TLS only, mandatory client certificates, and one user."""
    binaries = [binary for binary in redis_binaries() if _knows_tls(binary)]
    if not binaries:
        pytest.skip("NOT TESTED: no Redis of this machine speaks TLS (Debian's redis-server does)")
    folder = Folder(tmp_path / "redis-certificates")
    folder.sign("localhost")
    port = unused_port()
    rights = tmp_path / "users.acl"
    rights.write_text(f"user default off\nuser {USER} on >{PASSWORD} {RIGHTS}\n")
    log = tmp_path / "redis.log"
    server = _start(binaries[0], port, folder, rights, log)
    try:
        await until(lambda: b"Ready to accept connections" in log.read_bytes(), 10, "Redis is up")
        shown = "&".join(
            f"ssl_{key}={folder.path / name}"
            for key, name in (
                ("ca_certs", "authority.pem"),
                ("certfile", "operator.pem"),
                ("keyfile", "operator.key"),
            )
        )
        yield f"rediss://{USER}:{PASSWORD}@localhost:{port}/0?{shown}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def sentinel_url(redis_url: str, tmp_path: Path) -> AsyncIterator[str]:
    """URL of the same Redis by a sentinel with TLS only, which names it by the name in its certificate."""
    binary = next(binary for binary in redis_binaries() if _knows_tls(binary))
    port, master = unused_port(), redis_url.partition("/0?")[0].rpartition(":")[2]
    settings, log = tmp_path / "sentinel.conf", tmp_path / "sentinel.log"
    settings.write_text(
        "sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n"
        f"sentinel monitor {SERVICE} localhost {master} 1\n"
        f"sentinel auth-user {SERVICE} {USER}\nsentinel auth-pass {SERVICE} {PASSWORD}\n"
        f"requirepass {SENTINEL_PASSWORD}\n"
    )
    command = [str(binary), str(settings), "--sentinel", *_tls(port, tmp_path / "redis-certificates")]
    with log.open("wb") as output:
        server = subprocess.Popen(  # noqa: ASYNC220  # returns at once
            bound_command([*command, "--tls-replication", "yes"]), stdout=output
        )
    try:
        await until(lambda: b"+monitor master" in log.read_bytes(), 10, "the sentinel is up")
        login, _, options = redis_url.partition("?")
        yield (
            f"{login.partition('@')[0].replace('rediss:', 'rediss+sentinel:')}@localhost:{port}/{SERVICE}/0"
            f"?{options}&sentinel_password={SENTINEL_PASSWORD}"
        )
    finally:
        server.kill()
        server.wait()


def _tls(port: int, folder: Path) -> list[str]:
    return [
        *("--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1"),
        *("--tls-cert-file", str(folder / "localhost.pem")),
        *("--tls-key-file", str(folder / "localhost.key")),
        *("--tls-ca-cert-file", str(folder / "authority.pem")),
    ]


def _start(binary: Path, port: int, folder: Folder, rights: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [
        *(str(binary), *_tls(port, folder.path), "--aclfile", str(rights)),
        *("--save", "", "--appendonly", "no", "--dir", str(log.parent)),
    ]
    with log.open("wb") as output:
        return subprocess.Popen(bound_command(command), stdout=output, stderr=subprocess.STDOUT)


async def test_a_mesh_serves_on_a_redis_with_tls_and_a_user(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands of the mesh are within the rights, and neither logs nor arguments have the password."""
    monkeypatch.setenv(VARIABLE, redis_url)
    config = configure(
        engine={"arithmetic": "hashed"},
        prefill={"replicas": 1},
        decode={"replicas": 1},
        redis={"url": redis_url},
    )
    mesh = Mesh(config, tmp_path)
    try:
        await mesh.start()
        wanted = [token_request(range(5, 200), max_output_tokens=8, seed=seed) for seed in range(4)]
        answers = await generate_all(mesh.client(), wanted, concurrency=4)
        assert all(not answer.error for answer in answers), [answer.error for answer in answers]
        router = await mesh.status("router-0")
        assert router.redis_connected
        await until(lambda: _indexed(mesh), 20, "the prefix index came through Redis")
        for part in mesh.parts.values():
            assert part.process is not None
            command = Path(f"/proc/{part.process.pid}/cmdline").read_bytes()
            assert PASSWORD.encode() not in command, f"{part.name}: {command!r}"
    finally:
        await mesh.stop()
    for file in (path for path in tmp_path.rglob("*") if path.is_file() and path.name != "users.acl"):
        text = file.read_bytes()
        assert PASSWORD.encode() not in text, file
        assert b"refuses" not in text, f"{file.name}: {text.decode(errors='replace')}"


async def test_scripts_go_over_tls_as_the_same_user(redis_url: str) -> None:
    """The connection for scripts reads the same settings from the URL."""
    await assert_usable(redis_url)


async def test_sentinels_with_tls_lead_to_a_redis_with_tls(sentinel_url: str, tmp_path: Path) -> None:
    """With the same options and the same rights. Sentinels of another authority are refused."""
    await assert_usable(sentinel_url)
    other = Folder(tmp_path / "other")
    authority = sentinel_url.partition("ssl_ca_certs=")[2].partition("&")[0]
    link = RedisLink(sentinel_url.replace(authority, str(other.path / "authority.pem")))
    try:
        async with patience(10):
            with pytest.raises(RedisUnavailable, match="no sentinel names the master") as away:
                await link.execute("GET", "kvmesh:x")
    finally:
        await link.close()
    assert PASSWORD not in str(away.value) and SENTINEL_PASSWORD not in str(away.value)


async def assert_usable(url: str) -> None:
    """Assert that commands and scripts reach Redis."""
    link = RedisLink(url)
    try:
        async with patience(10):
            await link.execute("SET", "kvmesh:x", "here")
            assert await link.scripts(Script("return redis.call('GET', KEYS[1])"), [(("kvmesh:x",), ())]) == [
                b"here"
            ]
    finally:
        await link.close()


async def _indexed(mesh: Mesh) -> bool:
    return bool((await mesh.status("router-0")).index_block_count)


@pytest.mark.parametrize("spoil", ["password", "user", "certificate", "authority", "plain"])
async def test_a_rejected_login_raises_redis_away_without_the_password(
    redis_url: str, spoil: str, tmp_path: Path
) -> None:
    """Wrong password, unknown user, no certificate, another authority, plain text: RedisUnavailable, at once."""
    other = Folder(tmp_path / "other")
    authority = redis_url.partition("ssl_ca_certs=")[2].partition("&")[0]
    wrong = {
        "password": redis_url.replace(PASSWORD, "wrong-horse"),
        "user": redis_url.replace(f"{USER}:", "nobody:"),
        "certificate": redis_url.partition("&ssl_certfile")[0],
        "authority": redis_url.replace(authority, str(other.path / "authority.pem")),
        "plain": redis_url.replace("rediss://", "redis://").partition("?")[0],
    }[spoil]
    link = RedisLink(wrong)
    try:
        async with patience(10):
            with pytest.raises(RedisUnavailable) as away:
                await link.execute("GET", "kvmesh:x")
            with pytest.raises(RedisUnavailable) as script:
                await link.scripts(Script("return 1"), [((), ())])
    finally:
        await link.close()
    assert "horse" not in f"{away.value} {script.value}"
