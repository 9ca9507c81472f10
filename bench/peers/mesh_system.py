"""kvmesh with four decode replicas, each on an engine of its own in Triton."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from bench import engines, generation
from bench.engines import BLOCK_TOKENS, MODEL_VERSION, EngineCosts
from bench.mesh import Mesh, names
from bench.peers.chat_client import MUTE_S
from bench.peers.experiment import Schedule
from bench.peers.streams import Outcome, Stream
from bench.processes import Fleet, prepare_kill
from engines.reference.arithmetic import ChunkInput
from engines.reference.hashed import HashedArithmetic
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

WORKERS = names("decode", 4)
VICTIM = WORKERS[2]
DEADLINE_S = 60.0
READY_POLL_S = 0.02


class MeshSystem:
    """Implements System. A prompt is so short that decode runs it alone, as a worker behind a router does."""

    def __init__(self, fleet: Fleet, schedule: Schedule, seed: int) -> None:
        self.workers = frozenset(WORKERS)
        self.victim = self.returned = VICTIM
        self._fleet = fleet
        self._schedule = schedule
        self._draw = random.Random(seed)
        self._answers: list[tuple[Stream, list[int], list[int]]] = []

    async def start(self) -> None:
        """See System."""
        self._mesh = Mesh(self._fleet, dict.fromkeys(WORKERS, EngineCosts(self._schedule.interval_s)), {})
        self._channel = grpc.aio.insecure_channel(self._mesh.frontend.address)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def stream(self, slot: int, record: Stream, began_s: float) -> None:
        """See System. Here only number and positions of the tokens are checked; `close` compares the tokens."""
        now = asyncio.get_running_loop().time
        ids: list[int] = []
        prompt = generation.random_ids(self._schedule.prompt_words, self._draw)
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

    def prepare_kill(self) -> Callable[[], None]:
        """See System."""
        return prepare_kill(self._mesh.replicas[VICTIM], self._mesh.engines[VICTIM].process)

    async def start_again(self) -> None:
        """See System."""
        await asyncio.to_thread(engines.wait_ready, self._mesh.start_engine(VICTIM), READY_POLL_S)
        await asyncio.to_thread(self._mesh.start_replica(VICTIM).wait_ready)

    async def close(self, streams: list[Stream]) -> None:
        """See System."""
        await self._channel.close(None)
        judged = {id(stream) for stream in streams}
        for stream, prompt, ids in self._answers:
            if id(stream) in judged and ids != truth(prompt, len(ids)):
                stream.outcome, stream.detail = Outcome.WRONG, "a token that is not the expected one"

    def _ending(self, finished: pb.Finished, ids: list[int]) -> tuple[Outcome, str]:
        if len(ids) > self._schedule.tokens:
            return Outcome.WRONG, "a token beyond the last"
        if len(ids) < self._schedule.tokens or finished.usage.output_token_count != len(ids):
            return Outcome.LOST, "finished before the last token"
        if finished.finish_reason != pb.FINISH_REASON_LENGTH:
            return Outcome.LOST, f"finish reason {pb.FinishReason.Name(finished.finish_reason)}"
        return Outcome.DONE, ""


def truth(prompt: list[int], count: int) -> list[int]:
    """Return the first `count` greedy tokens after `prompt`, computed without mesh and engine."""
    arithmetic = HashedArithmetic(salt=MODEL_VERSION)
    blocks = np.arange(-(-(len(prompt) + count) // BLOCK_TOKENS), dtype=np.int32)
    store = arithmetic.new_store(len(blocks), BLOCK_TOKENS)
    ids: list[int] = []
    fresh, start = prompt, 0
    for _ in range(count):
        used = blocks[: -(-(start + len(fresh)) // BLOCK_TOKENS)]
        (logits,) = arithmetic.forward([ChunkInput(np.array(fresh, np.int32), start, used, True)], store)
        assert logits is not None
        ids.append(int(np.argmax(logits)))
        start += len(fresh)
        fresh = ids[-1:]
    return ids
