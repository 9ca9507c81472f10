"""A whole mesh under mutual TLS: the same tokens as without TLS, and renewal of certificates under load."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvmesh.cli.dial import Dial
from kvmesh.config import MeshConfig
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.certificates import Folder
from tests.integration.generation import Answer, generate, generate_all, token_request
from tests.integration.harness import Mesh, configure, running_engine, until
from tests.integration.oracle import Oracle
from tests.patience import quiet_s

pytestmark = pytest.mark.mesh

STREAMS = 16
OUTPUT_TOKENS = 200


class TrustedMesh(Mesh):
    """A mesh with a client that uses the operator's certificate."""

    def channel(self, name: str) -> grpc.aio.Channel:
        if name not in self._channels:
            dial = Dial(self.config)
            self._channels[name] = dial.channel(self.parts[name].address, name.rpartition("-")[0])
        return self._channels[name]


def config_of(folder: Folder) -> MeshConfig:
    """Two prefill and two decode replicas, all with certificates, and clients with certificates, too."""
    return configure(
        engine={
            "arithmetic": "hashed",
            "kv_blocks": 512,
            "prefill_kv_blocks": 512,
            "step_s": 0.02,
            "prefill_token_s": 0.0001,
        },
        frontend={
            "certificate": str(folder.path / "frontend.pem"),
            "key": str(folder.path / "frontend.key"),
            "client_authority": str(folder.path / "authority.pem"),
        },
        trust=folder.section(),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """The mesh's authority."""
    return Folder(tmp_path / "certificates")


@pytest.fixture
async def mesh(folder: Folder, tmp_path: Path) -> AsyncIterator[TrustedMesh]:
    """The running mesh."""
    made = TrustedMesh(config_of(folder), tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def requests(seed: int) -> list[pb.GenerateRequest]:
    """Prompts of 40 to 200 tokens, half of them with a common beginning."""
    chance = random.Random(seed)
    shared = [chance.randrange(5, 4096) for _ in range(96)]
    return [
        token_request(
            (shared if index % 2 else [])
            + [chance.randrange(5, 4096) for _ in range(chance.randint(40, 100))],
            max_output_tokens=OUTPUT_TOKENS,
            seed=chance.getrandbits(63),
            temperature=chance.choice((0.0, 1.0)),
        )
        for index in range(STREAMS)
    ]


async def alone(config: MeshConfig, wanted: list[pb.GenerateRequest], folder: Path) -> list[list[int]]:
    """Return the output of each request alone on an engine, which has no TLS."""
    end_token_id = json.loads((config.mesh.model_path / "config.json").read_text())["eos_token_id"]
    async with running_engine(config, folder, "--no-prefix-reuse", "--step-s", "0") as address:
        oracle = Oracle(address, end_token_id)
        expected = [await oracle.generate(list(each.tokens.ids), each) for each in wanted]
        await oracle.close()
    return expected


async def test_a_mesh_under_tls_serves_exactly_and_renews_under_load(
    folder: Folder, mesh: TrustedMesh, tmp_path: Path
) -> None:
    """Every hop is verified. Certificates are renewed and all processes connect anew: no stream is lost."""
    wanted = requests(3)
    expected = await alone(mesh.config, wanted, tmp_path)
    answers = await generate_all(mesh.client(), wanted, concurrency=STREAMS)
    assert all(not answer.error for answer in answers), [answer.error for answer in answers]
    assert [answer.ids for answer in answers] == expected

    progress: dict[int, int] = {}

    async def one(index: int) -> Answer:
        return await generate(
            mesh.client(), wanted[index], on_tokens=lambda answer: progress.update({index: len(answer.ids)})
        )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(STREAMS)]
        await until(
            lambda: len(progress) == STREAMS and min(progress.values()) >= 5, 60, "all streams have 5 tokens"
        )
        await asyncio.to_thread(folder.renew, "frontend", "router", "prefill", "decode")
        # Running processes keep their connections; the router's end breaks all of them, and the next ones are new.
        await mesh.parts["router-0"].end()
        assert not any(task.done() for task in tasks)
        await mesh.start("router-0")
    answers = [task.result() for task in tasks]
    assert all(not answer.error for answer in answers), [answer.error for answer in answers]
    assert [answer.ids for answer in answers] == expected
    for name in ("frontend-0", "prefill-0", "prefill-1", "decode-0", "decode-1"):
        log = mesh.parts[name].log
        await until(
            lambda log=log: "certificate renewed" in log.read_text(), 20, f"{name} has connected anew"
        )
    await mesh.close_channels()
    await mesh.idle(10)


async def test_a_replica_without_certificates_is_not_attached(mesh: TrustedMesh, tmp_path: Path) -> None:
    """The replica is registered in Redis like the others, and no process attaches to it: a line in the router's log,
    and no failed request.
    """
    await mesh.parts["decode-1"].end(signal.SIGTERM)
    part = mesh.parts["decode-1"]
    plain = tmp_path / "plain.toml"
    settings = (tmp_path / "kvmesh.toml").read_text()
    plain.write_text(settings[: settings.index("[trust]")].replace('client_authority = "', '# "'))
    part.command = [str(plain) if word.endswith("kvmesh.toml") else word for word in part.command]
    part.start()
    log = mesh.parts["router-0"].log
    await until(
        lambda: "the peer uses plain text, but this process has [trust]" in log.read_text(),
        30,
        "the refusal in the log",
    )
    wanted = requests(4)
    answers = await generate_all(mesh.client(), wanted, concurrency=STREAMS)
    assert all(not answer.error for answer in answers), [answer.error for answer in answers]
    status = await mesh.status("router-0")
    assert {view.replica for view in status.replicas if view.placeable} == {
        "prefill-0",
        "prefill-1",
        "decode-0",
    }


async def test_a_client_without_a_certificate_gets_nothing(mesh: TrustedMesh, folder: Folder) -> None:
    """Plain text, an unknown certificate, no certificate: refused at once by a frontend that requires certificates."""
    address = mesh.parts["frontend-0"].address
    authority = (folder.path / "authority.pem").read_bytes()
    named = [("grpc.ssl_target_name_override", "frontend.kvmesh.internal")]
    for channel in (
        grpc.aio.insecure_channel(address),
        grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options=named),
    ):
        async with channel:
            from kvmesh.inference.v1 import inference_pb2_grpc

            began_s = quiet_s()
            answer = await generate(
                inference_pb2_grpc.InferenceServiceStub(channel), requests(1)[0], timeout_s=20
            )
            assert answer.code is grpc.StatusCode.UNAVAILABLE and not answer.ids
            assert quiet_s() - began_s < 10  # not the 20 s of the call
