"""kvmesh as `kvmesh up` starts it, with four decode replicas, each on an engine of its own in Triton."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
import numpy as np

from bench import engines, generation, prompts
from bench.engines import Engine
from bench.peers.chat_client import MUTE_S
from bench.peers.experiment import Schedule
from bench.peers.streams import Outcome, Stream
from bench.processes import ANY_CORE, START_TIMEOUT_S, Fleet, Process, aim
from engines.reference.arithmetic import ChunkInput
from engines.reference.hashed import HashedArithmetic
from kvmesh.cli import processes as plan
from kvmesh.cli import readiness, shared_memory
from kvmesh.config import MeshConfig, describe
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.ports import free_ports

REPLICAS = 4
VICTIM = "decode-2"
DEADLINE_S = 60.0
READY_POLL_S = 0.02


class MeshSystem:
    """Implements System. A prompt is so short that decode runs it alone, as a worker behind a router does."""

    def __init__(self, fleet: Fleet, schedule: Schedule, seed: int) -> None:
        self.workers = frozenset(f"decode-{index}" for index in range(REPLICAS))
        self.victim = self.returned = VICTIM
        self._fleet = fleet
        self._schedule = schedule
        self._draw = random.Random(seed)
        self._config = configuration(schedule)
        self._plan: dict[str, plan.Process] = {}
        self._commands: dict[str, list[str]] = {}
        self._running: dict[str, Process] = {}
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None  # the stub's types are those of the sync API
        self._answers: list[tuple[Stream, list[int], list[int]]] = []

    async def start(self) -> None:
        """See System."""
        folder = self._fleet.folder
        config_file = folder / "kvmesh.toml"
        config_file.write_text(describe(self._config), encoding="utf-8")
        self._plan = {one.name: one for one in plan.processes_of(self._config, config_file, folder)}
        taken = {int(word) for one in self._plan.values() for word in one.command if word.isdecimal()}
        ports = (port for port in free_ports("127.0.0.1", len(self._plan) + len(taken)) if port not in taken)
        for name, one in self._plan.items():
            command = list(one.command)
            if "--listen" in command:  # who is started again keeps its address
                command[command.index("--listen") + 1] = f"127.0.0.1:{next(ports)}"
            self._commands[name] = command
            if one.shared_memory:
                self._fleet.at_end(lambda prefix=one.shared_memory: shared_memory.clear(prefix))  # type: ignore[misc]
        await self._start(lambda one: one.role in ("redis", "engine"))
        await self._start(lambda one: one.role not in ("redis", "engine"))
        self._channel = grpc.aio.insecure_channel(self._running["frontend-0"].address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def stream(self, slot: int, record: Stream, began_s: float) -> None:
        """See System. Tokens are compared by `close`, which knows what is right; their count and positions here."""
        now = asyncio.get_running_loop().time
        ids: list[int] = []
        prompt = prompts.random_ids(self._schedule.prompt_words, self._draw)
        request = generation.request(prompt, self._schedule.tokens, explain=True)
        self._answers.append((record, prompt, ids))
        outcome, detail = Outcome.LOST, "ended without finished"
        call = self._stub.Generate(request, timeout=DEADLINE_S)
        try:
            while True:
                async with asyncio.timeout(MUTE_S):
                    message = await call.read()
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                    break
                match message.WhichOneof("event"):
                    case "tokens":
                        if message.tokens.ids and message.tokens.position != len(ids):
                            outcome, detail = Outcome.WRONG, "a token missing or repeated"
                            break
                        ids += message.tokens.ids
                        if message.tokens.ids:
                            record.arrive(now() - began_s, len(message.tokens.ids))
                    case "finished":
                        outcome, detail = self._ending(message.finished, ids)
                        attempts = message.finished.explanation.attempts
                        record.workers = [one.decode_replica for one in attempts if one.decode_replica]
        except grpc.aio.AioRpcError as error:
            outcome, detail = Outcome.LOST, f"{error.code().name}: {error.details()}"
        except TimeoutError:
            outcome, detail = Outcome.LOST, f"mute for {MUTE_S:g} s"
        finally:
            call.cancel()
        record.end(now() - began_s, outcome, detail)

    def aim(self) -> Callable[[], None]:
        """See System."""
        return aim(self._running[VICTIM], self._running[f"{VICTIM}-engine"])

    async def start_again(self) -> None:
        """See System."""
        await self._start(lambda one: one.name == f"{VICTIM}-engine")
        await self._start(lambda one: one.name == VICTIM)

    async def close(self, streams: list[Stream]) -> None:
        """See System."""
        if self._channel is not None:
            await self._channel.close(None)
        judged = {id(stream) for stream in streams}
        for stream, prompt, ids in self._answers:
            if id(stream) in judged and ids != truth(prompt, len(ids), self._config):
                stream.outcome, stream.detail = Outcome.WRONG, "a token that is not the expected one"

    async def _start(self, wanted: Callable[[plan.Process], bool]) -> None:
        """Start the processes that `wanted` picks and return when each is ready."""
        picked = [one for one in self._plan.values() if wanted(one)]
        for one in picked:
            self._running[one.name] = self._fleet.start(one.name, self._commands[one.name], ANY_CORE)
        await asyncio.gather(*(self._ready(one) for one in picked))

    async def _ready(self, one: plan.Process) -> None:
        process = self._running[one.name]
        match one.ready:
            case readiness.ReadyLine():
                answer = await asyncio.to_thread(process.read_answer, START_TIMEOUT_S)
                process.address = answer["address"]
            case readiness.RedisReady(address):
                await asyncio.to_thread(process.wait_for_port, int(address.rpartition(":")[2]))
            case readiness.ModelReady(address):
                await asyncio.to_thread(engines.wait_ready, Engine(process, address), READY_POLL_S)

    def _ending(self, finished: pb.Finished, ids: list[int]) -> tuple[Outcome, str]:
        if len(ids) > self._schedule.tokens:
            return Outcome.WRONG, "a token beyond the last"
        if len(ids) < self._schedule.tokens or finished.usage.output_token_count != len(ids):
            return Outcome.LOST, "finished before the last token"
        if finished.finish_reason != pb.FINISH_REASON_LENGTH:
            return Outcome.LOST, f"finish reason {pb.FinishReason.Name(finished.finish_reason)}"
        return Outcome.DONE, ""


def configuration(schedule: Schedule) -> MeshConfig:
    """Return the defaults, but for four decode replicas, no prefill, and an engine that steps at the schedule's pace."""
    default = MeshConfig()
    return MeshConfig(
        engine=msgspec.structs.replace(default.engine, arithmetic="hashed", step_s=schedule.interval_s),
        prefill=msgspec.structs.replace(default.prefill, replicas=0),
        decode=msgspec.structs.replace(default.decode, replicas=REPLICAS),
    )


def truth(prompt: list[int], count: int, config: MeshConfig) -> list[int]:
    """Return the first `count` greedy tokens after `prompt`, computed here, with no mesh and no engine between."""
    arithmetic = HashedArithmetic(salt=config.engine.salt)
    tokens = config.engine.block_tokens
    blocks = np.arange(-(-(len(prompt) + count) // tokens), dtype=np.int32)
    store = arithmetic.new_store(len(blocks), tokens)
    ids: list[int] = []
    fresh, start = prompt, 0
    for _ in range(count):
        used = blocks[: -(-(start + len(fresh)) // tokens)]
        (logits,) = arithmetic.forward([ChunkInput(np.array(fresh, np.int32), start, used, True)], store)
        assert logits is not None
        ids.append(int(np.argmax(logits)))
        start += len(fresh)
        fresh = ids[-1:]
    return ids
