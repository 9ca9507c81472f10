"""The engine port on a real tritonserver that reloads or unloads its model while a step stream has calls."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvmesh.triton.client import MODEL
from kvmesh.triton.errors import EngineLost
from tests.conftest import unused_port
from tests.integration.harness import START_S_MAX, running_engine, until
from tests.integration.replicas.test_engine_port import CONFIG, running_port
from tests.integration.replicas.test_engine_silence import idle
from tests.unit.triton.contract import Rig, call

pytestmark = pytest.mark.mesh

TOKENS = 150
UNLOADED = f"successfully unloaded '{MODEL}'"


async def test_a_model_is_reloaded_and_unloaded_under_a_step_stream(tmp_path: Path) -> None:
    """A replaced model: its calls fail with EngineLost at the next call. An unloaded model: its calls go on to their end,
    new calls fail with EngineLost, and the replica is not ready. Each time the old model ends, so its KV is freed, and the
    new model serves.
    """
    async with (
        running_engine(CONFIG, tmp_path, "--step-s", "0.02") as address,
        grpc.aio.insecure_channel(address) as channel,
        running_port(address, []) as (rig, _),
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        await started(rig, 1, 2)
        await stub.RepositoryModelLoad(await with_other_port(stub))
        late = await rig.run(3, call(name="3"))
        errors = [rig.sink.heard(number).error for number in (1, 2)]
        assert all(isinstance(error, EngineLost) for error in (*errors, late.error)), (errors, late)
        await serves(rig, 4)

        await started(rig, 5, 6)
        await stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name=MODEL))
        assert isinstance((await rig.run(7, call(name="7"))).error, EngineLost)
        await until(lambda: not rig.sink.is_ready, START_S_MAX, "the replica is not ready")
        await rig.until(lambda: all(rig.sink.heard(number).is_over() for number in (5, 6)))
        assert all(len(rig.sink.heard(number).ids) == TOKENS for number in (5, 6))

        async def is_loaded() -> bool:
            # The first model's port is free after its end.
            try:
                await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=MODEL))
            except grpc.aio.AioRpcError:
                return False
            return True

        await until(is_loaded, START_S_MAX, "the model is loaded")
        await until(lambda: rig.sink.is_ready, START_S_MAX, "the replica is ready")
        await serves(rig, 8)
        log = tmp_path / "engine.log"
        await until(lambda: log.read_text().count(UNLOADED) == 2, START_S_MAX, "both former models end")


async def started(rig: Rig, *numbers: int) -> None:
    """Start calls, and wait for a token of each."""
    for number in numbers:
        rig.engine.start(number, call(name=f"{number}", max_output_tokens=TOKENS))
    await rig.until(lambda: all(rig.sink.heard(number).ids for number in numbers))


async def serves(rig: Rig, number: int) -> None:
    """Wait until a call succeeds and the engine holds no blocks."""
    assert (await rig.run(number, call(name=f"{number}"))).error is None
    await idle(rig)


async def with_other_port(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> service_pb2.RepositoryModelLoadRequest:
    """Return the request that loads the model anew, with another port for KV: the old model still has its own."""
    config = (await stub.ModelConfig(service_pb2.ModelConfigRequest(name=MODEL))).config
    engine = json.loads(config.parameters["engine"].string_value)
    config.parameters["engine"].string_value = json.dumps({**engine, "kv_port": unused_port()})
    request = service_pb2.RepositoryModelLoadRequest(model_name=MODEL)
    request.parameters["config"].string_param = json_format.MessageToJson(
        config, preserving_proto_field_name=True
    )
    return request
