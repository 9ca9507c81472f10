"""`kvmesh profile` and `kvmesh replicas` against real control processes: a leader and a follower, good and bad input."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane import core
from controlplane.main import ControlProcess
from controlplane.store.documents import Document, value_of
from controlplane.warmup.packages import Package, ShapeRow, encode, package_name
from controlplane.warmup.references import ReferenceKey
from kvmesh.config import MeshConfig, build
from kvmesh.control.v1 import warm_up_pb2 as pb
from kvmesh.control.v1 import warm_up_pb2_grpc
from kvmesh.redis_link import RedisLink
from kvmesh.trust.names import CERTIFICATE_ROLES
from tests.certificates import Folder
from tests.integration.control.conftest import own_redis, url  # noqa: F401 - fixtures
from tests.integration.control.control_process import control, leading, until
from tests.integration.control.test_trust import called_by, fault_of
from tests.integration.router.conftest import RedisServer
from tests.integration.warmup.warm_mesh import PACKAGES, run_command

VERSION = "kvmesh-1"
KEY = ReferenceKey(VERSION, "build-1")
NAME = package_name("prefill", KEY)
SETTINGS = build({"engine": {"arithmetic": "hashed"}})


@pytest.fixture(autouse=True)
def quick_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """No receiver is waited for."""
    monkeypatch.setattr(core, "TAKEOVER_S", 0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an operator."""
    (tmp_path / "kvmesh.toml").write_text('[engine]\narithmetic = "hashed"\n')
    return tmp_path


def package() -> Package:
    """Return a package."""
    return Package(
        name=NAME,
        model_version=VERSION,
        role="prefill",
        engine_digest=KEY.engine_digest,
        made_s=time.time(),
        made_from="default",
        shapes=(ShapeRow(32), ShapeRow(64)),
        prefixes=((111_111, 222_222),),
    )


@asynccontextmanager
async def packed(url: str, config: MeshConfig = SETTINGS) -> AsyncIterator[ControlProcess]:  # noqa: F811
    """A leader that has read one good package and one that is none."""
    link = RedisLink(url)
    found = package()
    await link.execute("HSET", PACKAGES, NAME, value_of(Document(1, encode(found))))
    await link.execute("HSET", PACKAGES, "bad", value_of(Document(1, b'{"name":"bad"}')))
    await link.close()
    async with leading(url, config=config) as one:
        await until(lambda: bool(one.core.warming.packages.problems), "packages are read")
        yield one


async def test_packages_are_listed_shown_and_quarantined(url: str, folder: Path) -> None:  # noqa: F811
    """Through a follower as well; a dry run changes nothing; tokens are never printed."""
    async with packed(url) as leader, control(url, "control-1", SETTINGS) as follower:

        async def kvmesh(*words: str) -> tuple[int, str, str]:
            answer = await run_command(folder, url, *words)
            assert "111111" not in answer[1] + answer[2]
            return answer

        await until(lambda: follower.core.has_redis and not follower.core.leads, "a follower")
        status, shown, errors = await kvmesh("profile", "list")
        assert status == 1 and NAME in shown and errors.startswith('The stored package "bad" is not used: ')
        listed = json.loads((await kvmesh("profile", "list", "--json"))[1])
        assert listed["profiles"][0]["prefix_token_count"] == 2 and set(listed["problems"]) == {"bad"}
        status, shown, _ = await kvmesh("profile", "show", NAME)
        assert status == 0 and "Prompt lengths: 32, 64" in shown
        assert json.loads((await kvmesh("profile", "show", NAME, "--json"))[1])["name"] == NAME
        status, _, errors = await kvmesh("profile", "show", "x")
        assert status == 2 and errors == f'NAME = "x" is no package: allowed are "{NAME}".\n'

        status, _, errors = await kvmesh("profile", "quarantine", "x")
        assert status == 1 and "x" in errors and "kvmesh profile list" in errors
        status, _, errors = await kvmesh("profile", "quarantine", NAME, "--reason", "r" * 300)
        assert status == 2 and "300 characters" in errors and "200" in errors
        status, shown, _ = await kvmesh("profile", "quarantine", NAME, "--dry-run")
        assert status == 0 and "would be quarantined" in shown and _reason(leader) == ""
        async with grpc.aio.insecure_channel(follower.server.address) as channel:
            stub: Any = warm_up_pb2_grpc.WarmUpServiceStub(channel)
            fault = await fault_of(stub.QuarantineProfile(pb.QuarantineProfileRequest(name=NAME)))
        assert fault is not None and fault.reason == "NOT_LEADER"
        assert fault.metadata["leader_address"] == leader.server.address
        status, shown, errors = await kvmesh("profile", "quarantine", NAME, "--reason", "a test")
        assert (status, errors) == (0, "") and _reason(leader) == "a test"
        assert "a test" in (await kvmesh("profile", "list"))[1]
        status, shown, _ = await kvmesh("profile", "quarantine", NAME, "--lift", "--dry-run")
        assert status == 0 and _reason(leader) == "a test" and "would" in shown
        assert (await kvmesh("profile", "quarantine", NAME, "--lift"))[0] == 0 and _reason(leader) == ""


def _reason(one: ControlProcess) -> str:
    found = one.core.warming.packages.named(NAME)
    assert found is not None
    return found.quarantined


async def test_prefixes_are_registered_listed_and_deleted(url: str, folder: Path) -> None:  # noqa: F811
    """Good and bad input: an error names the field, the value and the range."""
    good, empty, huge, bad, text = (folder / name for name in ("good", "empty", "huge", "bad", "text"))
    good.write_text(json.dumps([111_111, 111_111, 5]))
    empty.write_text("[]")
    huge.write_text(json.dumps([1] * 16_385))
    text.write_bytes(b"\xff\xfe")
    async with packed(url) as leader:

        async def add(*words: str) -> tuple[int, str, str]:
            answer = await run_command(folder, url, "profile", "prefix", "add", *words)
            assert "111111" not in answer[1] + answer[2]
            return answer

        for words, said in (
            (("p",), "--text or --token-ids"),
            (("p", "--token-ids", str(good), "--text", str(text)), "--text or --token-ids"),
            (("p", "--token-ids", str(folder / "none")), "cannot be read: No such file"),
            (("p", "--token-ids", str(empty)), "has 0 tokens: allowed are 1 to 16384"),
            (("p", "--token-ids", str(huge)), "has 16385 tokens: allowed are 1 to 16384"),
            (("p", "--text", str(text)), "is not UTF-8 text"),
            (("p", "--token-ids", str(good), "--version", "v9"), '--version = "v9": allowed is "kvmesh-1"'),
            (("", "--token-ids", str(good)), "NAME = '' is no name"),
        ):
            status, _, errors = await add(*words)
            assert status == 2 and said in errors, errors
        for content in ("{", "[1.5]", "[true]", "[-1]", "[2147483648]", '{"a":1}'):
            bad.write_text(content)
            status, _, errors = await add("p", "--token-ids", str(bad))
            assert status == 2 and f"--token-ids = {bad} " in errors, errors
        status, _, errors = await add("a b", "--token-ids", str(good))
        assert status == 1 and 'is "a b"' in errors and "64 letters" in errors, errors

        status, shown, _ = await add("p", "--token-ids", str(good), "--dry-run")
        short = "It is shorter than a KV block of 32 tokens, so no replica caches it.\n"
        assert status == 0 and shown == f'Would register "p": 3 tokens of kvmesh-1.\n{short}'
        assert not leader.core.warming.prefixes.ordered()
        assert (await add("p", "--token-ids", str(good)))[:2] == (
            0,
            f'Registered "p": 3 tokens of kvmesh-1.\n{short}',
        )
        for count, said in (
            (40, "Replicas cache its first 32 tokens: full KV blocks of 32.\n"),
            (64, ""),
        ):
            bad.write_text(json.dumps([5] * count))
            status, shown, _ = await add("q", "--token-ids", str(bad), "--dry-run")
            assert (status, shown) == (0, f'Would register "q": {count} tokens of kvmesh-1.\n{said}')
        status, shown, _ = await run_command(folder, url, "profile", "prefix", "list", "--json")
        assert status == 0 and json.loads(shown)["prefixes"][0]["token_count"] == 3
        delete = ("profile", "prefix", "delete")
        assert (await run_command(folder, url, *delete, "p", "--dry-run"))[1] == 'Would delete "p".\n'
        assert leader.core.warming.prefixes.get("p") is not None
        assert (await run_command(folder, url, *delete, "p"))[:2] == (0, 'Deleted "p".\n')
        status, _, errors = await run_command(folder, url, *delete, "p")
        assert status == 1 and 'No prefix is named "p"' in errors
        assert (await run_command(folder, url, "profile", "prefix", "list"))[
            1
        ] == "No prefix is registered.\n"


async def test_without_a_control_plane_or_a_redis_the_commands_say_so(
    url: str,  # noqa: F811
    own_redis: RedisServer,  # noqa: F811
    folder: Path,
) -> None:
    """Exit status 1 and one sentence; a write without Redis is refused and changes nothing."""
    ids = folder / "ids"
    ids.write_text("[1]")
    words = ("profile", "prefix", "add", "p", "--token-ids", str(ids))
    for each in (("profile", "list"), words):
        status, shown, errors = await run_command(folder, url, *each)
        assert (status, shown) == (1, "") and errors.startswith("No control plane runs in this mesh")
    async with packed(url) as leader:
        stub: Any = warm_up_pb2_grpc.WarmUpServiceStub
        own_redis.stop()
        await until(lambda: not leader.core.has_redis, "the leader sees that Redis is gone")
        status, _, errors = await run_command(folder, url, *words)
        assert status == 1 and "The control processes are unknown: " in errors
        async with grpc.aio.insecure_channel(leader.server.address) as channel:
            request = pb.AddPrefixRequest(name="p", model_version=VERSION, token_ids=bytes(4))
            fault = await fault_of(stub(channel).AddPrefix(request))
        assert fault is not None and fault.reason in ("STORE_UNAVAILABLE", "NOT_LEADER")
        assert not leader.core.warming.prefixes.ordered()
        await own_redis.start()


@pytest.mark.parametrize("role", CERTIFICATE_ROLES)
async def test_a_certificate_gives_the_rights_of_its_role(
    url: str,  # noqa: F811
    role: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Every role reads; operators and control processes change."""
    certificates = Folder(tmp_path_factory.mktemp("certs")).section()
    config = build({"engine": {"arithmetic": "hashed"}, "trust": certificates})
    async with packed(url, config) as leader, called_by(leader, config, role) as channel:
        stub: Any = warm_up_pb2_grpc.WarmUpServiceStub(channel)
        for read in (
            stub.ListLives(pb.ListLivesRequest()),
            stub.ListProfiles(pb.ListProfilesRequest()),
            stub.ListPrefixes(pb.ListPrefixesRequest()),
        ):
            assert await fault_of(read) is None
        for write in (
            stub.QuarantineProfile(pb.QuarantineProfileRequest(name=NAME)),
            stub.AddPrefix(pb.AddPrefixRequest(name="p", model_version=VERSION, token_ids=bytes(4))),
            stub.DeletePrefix(pb.DeletePrefixRequest(name="p")),
        ):
            fault = await fault_of(write)
            assert (fault is None) == (role in ("operator", "control")), fault
            assert fault is None or fault.reason == "PEER_REFUSED"
