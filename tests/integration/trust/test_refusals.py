"""Untrusted peers are refused at once, with a reason in the log; they are accepted as soon as their files are
corrected.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.cli.certificates import section
from kvmesh.cli.health import Probe, health
from kvmesh.config import ConfigError
from kvmesh.metrics import open_fds
from kvmesh.trust.peers import Trust
from tests.certificates import Folder
from tests.integration.harness import until
from tests.integration.trust.ends import config_of, linked, serving
from tests.patience import quiet_s

AT_ONCE_S = 5.0
"""Timeout for a refusal: it takes milliseconds, but the machine may be busy."""


@dataclass
class Case:
    """Caller, server, and the expected text in the caller's log."""

    name: str
    caller: Callable[[Folder, Folder], Trust]
    server: Callable[[Folder, Folder], Trust]
    says: str


def _trust(role: str) -> Callable[[Folder, Folder], Trust]:
    return lambda own, _: Trust(config_of(own), role)


def _plain(own: Folder, other: Folder) -> Trust:
    return Trust(config_of(None), "router")


def _of_other(role: str) -> Callable[[Folder, Folder], Trust]:
    return lambda _, other: Trust(config_of(other), role)


def _over(role: str) -> Callable[[Folder, Folder], Trust]:
    """A process with a certificate that expired while it ran."""

    def trust(own: Folder, _: Folder) -> Trust:
        made = Trust(config_of(own), role)
        old = own.files(role)
        own.expire(role)
        # the certificate of a process that did not renew in time
        assert made._reloader is not None
        made._reloader._material = type(made._reloader._material)(
            Path(old.certificate).read_bytes(),
            Path(old.key).read_bytes(),
            Path(old.authority).read_bytes(),
            (),
            0.0,
        )
        made._reloader._stamp = made._reloader.files.stamp()
        return made

    return trust


def _believing_both(own: Folder, other: Folder) -> Trust:
    """A caller with a certificate of another authority."""
    mixed = Folder(own.path / "mixed")
    mixed.take_from(other, "frontend")
    (mixed.path / "authority.pem").write_bytes(
        (own.path / "authority.pem").read_bytes() + (other.path / "authority.pem").read_bytes()
    )
    return Trust(config_of(mixed), "frontend")


CASES = [
    Case("prefill-as-caller", _trust("prefill"), _trust("router"), "is for frontend.kvmesh.internal"),
    Case("operator-as-caller", _trust("operator"), _trust("router"), "is for frontend.kvmesh.internal"),
    Case("prefill-as-router", _trust("frontend"), _trust("prefill"), "is not for router.kvmesh.internal"),
    Case(
        "caller-of-another-authority",
        _of_other("frontend"),
        _trust("router"),
        "the peer's certificate is refused",
    ),
    Case(
        "server-of-another-authority",
        _trust("frontend"),
        _of_other("router"),
        "the peer's certificate is refused",
    ),
    Case("caller-that-believes-both", _believing_both, _trust("router"), "trusts another authority"),
    Case(
        "caller-is-over",
        _over("frontend"),
        _trust("router"),
        "the peer refuses the certificate of this process: trust.certificate",
    ),
    Case("server-is-over", _trust("frontend"), _over("router"), "certificate has expired"),
    Case("plain-caller", _plain, _trust("router"), "the peer uses TLS, but this process has no [trust]"),
    Case(
        "plain-server", _trust("frontend"), _plain, "the peer uses plain text, but this process has [trust]"
    ),
]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Another authority with certificates for the same names."""
    return Folder(tmp_path_factory.mktemp("other"))


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    """The mesh's authority."""
    return Folder(tmp_path / "own")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_untrusted_peers_are_refused_at_once_with_a_reason(
    case: Case, own: Folder, other: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """No stream is opened, the caller's log has the reason, and the attempts leave nothing behind."""
    server, caller = case.server(own, other), case.caller(own, other)
    async with serving(server) as (address, service):
        async with linked(caller, address) as (link, seen):
            await until(lambda: "cannot attach" in caplog.text, AT_ONCE_S, "the refusal in the log")
            (record,) = [each for each in caplog.records if each.message == "cannot attach"]
            assert case.says in vars(record)["why"], vars(record)
            assert record.levelno == logging.WARNING
            await until(lambda: link.failures >= 3, 10, "three attempts")
            tasks, files = len(asyncio.all_tasks()), open_fds()
            await until(lambda: link.failures >= 8, 20, "more attempts")

            def leaves_nothing() -> bool:
                gc.collect()
                return len(asyncio.all_tasks()) <= tasks + 4 and open_fds() <= files + 4

            # gRPC closes its connections on threads of its own, which may wait for a CPU.
            await until(leaves_nothing, 10, "attempts leave nothing", every_s=0.05)
        assert not seen.attached and not service.opened
        assert len([each for each in caplog.records if each.message == "cannot attach"]) == 1, "told once"


async def test_trusted_peers_are_attached(own: Folder) -> None:
    """The cases above fail for their reasons: with the right certificates on both ends the stream is opened."""
    async with (
        serving(Trust(config_of(own), "router")) as (address, service),
        linked(Trust(config_of(own), "frontend"), address) as (link, _),
    ):
        await until(lambda: link.is_up, 10, "attached")
        assert service.opened == ["caller"]


@pytest.mark.parametrize("side", ["frontend", "router"])
async def test_a_corrected_file_is_used_without_a_restart(own: Folder, other: Folder, side: str) -> None:
    """A refused process is accepted as soon as its certificate is in place, on either end."""
    server, caller = Trust(config_of(own), "router"), Trust(config_of(own), "frontend")
    spoiled = _over(side)(own, other)
    server, caller = (spoiled, caller) if side == "router" else (server, spoiled)
    async with serving(server) as (address, _), linked(caller, address) as (link, seen):
        await until(lambda: link.failures >= 2, 10, "refused")
        own.renew(side)
        await until(lambda: link.is_up, 10, "attached")
        assert seen.attached == 1


async def test_an_authority_is_changed_without_a_restart(own: Folder, other: Folder) -> None:
    """Old and new authority in one file, then new certificates, then the old authority removed: each step while
    serving.
    """
    server, caller = Trust(config_of(own), "router"), Trust(config_of(own), "frontend")
    authority = own.path / "authority.pem"
    new = (other.path / "authority.pem").read_bytes()

    async def attaches() -> None:
        async with linked(caller, address) as (link, _):
            await until(lambda: link.is_up, 10, "attached")

    async with serving(server) as (address, _):
        await attaches()
        authority.write_bytes(authority.read_bytes() + new)
        await attaches()
        own.take_from(other, "router")
        await attaches()
        own.take_from(other, "frontend")
        await attaches()
        authority.write_bytes(new)
        await attaches()


async def test_health_is_for_every_role_and_only_with_a_certificate(own: Folder) -> None:
    """A health check uses the process's own certificate; a check without one gets no answer and does not wait."""

    async def check(channel: grpc.aio.Channel) -> grpc.StatusCode:
        async with channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

    async with serving(Trust(config_of(own), "router")) as (address, _):
        for role in ("router", "operator", "decode"):
            assert await check(Trust(config_of(own), role).channel(address, "router")) is grpc.StatusCode.OK
        began_s = quiet_s()
        assert await check(_plain(own, own).channel(address, "router")) is grpc.StatusCode.UNAVAILABLE
        assert quiet_s() - began_s < AT_ONCE_S


@pytest.mark.parametrize("role", ["router", "decode"])
async def test_a_container_checks_its_health_with_its_own_certificate(
    own: Folder, tmp_path: Path, role: str
) -> None:
    """`kvmesh health` needs the configuration alone; an expired certificate is reported."""
    path = tmp_path / "kvmesh.toml"
    path.write_text(section(own.path))
    probe = Probe("", role=role, config=str(path))
    async with serving(Trust(config_of(own), role), role) as (address, _):
        probe = replace(probe, address=address)
        assert "does not serve now" in await asyncio.to_thread(
            health, probe
        )  # no process says that it serves
        own.expire(role)
        with pytest.raises(ConfigError, match="expired"):
            await asyncio.to_thread(health, probe)
