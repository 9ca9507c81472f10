"""Legitimate clients beside an attack, in a process of their own: they wait for the mesh, not for the attacker's loop.

Each call has a deadline and a prompt of its own. Every second call uses a connection of its own, the others share one.
The process writes one JSON line per call to stdout. A request is drawn from the number of its call, so a reader of the
lines can compute the right tokens. SIGUSR1 stops new calls, SIGUSR2 begins them again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec

from kvmesh import errors
from kvmesh.child import bound_command
from kvmesh.config import ROOT
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.abuse.target import bearer
from tests.chaos.clients import request_of
from tests.chaos.cpu import Lateness
from tests.chaos.plan import AFTER, FIRST_TOKEN_ID, VOCABULARY, Stream
from tests.integration.generation import generate
from tests.integration.harness import START_S_MAX, until

DEADLINE_S: Final = 10.0
"""Deadline of a legitimate call."""

SHORT_DEADLINE_S: Final = 60.0
"""Deadline in the short form, which judges no times: a test run beside it takes most of two cores."""

KEY_VARIABLE: Final = "ABUSE_API_KEY"


class Call(msgspec.Struct, frozen=True):
    """One call of a legitimate client. Times are of the machine's monotonic clock."""

    number: int
    sent_s: float
    ended_s: float
    code: str
    reason: str
    text: str
    ids: list[int]
    late_s: float
    """Longest delay with which the machine woke this process, since its start."""


def stream_of(number: int) -> Stream:
    """Return the request of call `number`. It is too long for decode alone, so both roles serve a part of it."""
    rng = random.Random(f"bystander {number}")
    length = rng.randint(80, 160)
    return Stream(
        number=number,
        phase=AFTER,
        offset_s=0.0,
        prompt=tuple(rng.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(length)),
        max_output_tokens=rng.randint(4, 12),
        seed=rng.getrandbits(62),
        temperature=1.0 if number % 2 else 0.0,
        top_k=0,
        is_plain=True,
        frontend=0,
    )


class Bystanders:
    """The process of the legitimate clients, and the calls that it reported. Made by `calling`."""

    def __init__(self, log: Path, process: subprocess.Popen[bytes]) -> None:
        self._log = log
        self._process = process

    def pause(self) -> None:
        """Begin no new call."""
        self._process.send_signal(signal.SIGUSR1)

    def resume(self) -> None:
        """Begin calls again."""
        self._process.send_signal(signal.SIGUSR2)

    def calls(self) -> list[Call]:
        """Return the calls that have ended."""
        lines = self._log.read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line, type=Call) for line in lines]

    def between(self, since_s: float, until_s: float) -> list[Call]:
        """Return the ended calls that were under way at some time in [since_s, until_s)."""
        return [call for call in self.calls() if call.ended_s >= since_s and call.sent_s < until_s]


@asynccontextmanager
async def calling(
    address: str, key: str, per_s: float, folder: Path, deadline_s: float
) -> AsyncIterator[Bystanders]:
    """Let clients call the frontend at `address` inside the block, `per_s` times a second, each with `deadline_s`."""
    log, errors_log = folder / "bystanders.jsonl", folder / "bystanders.log"
    command = bound_command(
        [sys.executable, "-m", "tests.abuse.bystanders", address, str(per_s), str(deadline_s)]
    )
    with log.open("wb") as out, errors_log.open("wb") as err:
        process = subprocess.Popen(  # noqa: ASYNC220  # it must die with this thread
            command, stdout=out, stderr=err, cwd=ROOT, env={**os.environ, KEY_VARIABLE: key}
        )
    try:
        made = Bystanders(log, process)
        await until(lambda: bool(made.calls()), START_S_MAX, "a legitimate call has ended")
        yield made
        assert process.poll() is None, f"the bystanders ended:\n{errors_log.read_text()}"
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def _one(number: int, stub: Any, late: Lateness, deadline_s: float) -> None:
    began_s = time.monotonic()
    code, reason, text, ids = "OK", "", "", list[int]()
    try:
        answer = await generate(stub, request_of(stream_of(number)), timeout_s=deadline_s)
        ids = answer.ids
        if answer.error is not None:
            details = errors.from_rpc_error(answer.error)
            code, reason, text = details.code.name, details.reason, details.message[:200]
    except AssertionError as error:
        code, text = "BROKEN_RULE", str(error)
    line = Call(number, began_s, time.monotonic(), code, reason, text, ids, round(late.longest_s, 3))
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


class _Keyed:
    """A stub that sends a key with every call."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = bearer(key)

    def Generate(self, request: Any, timeout: float) -> Any:
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)


async def _run(address: str, per_s: float, deadline_s: float, key: str) -> None:
    late = Lateness()
    shared = _Keyed(grpc.aio.insecure_channel(address), key)

    async def fresh(number: int) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await _one(number, _Keyed(channel, key), late, deadline_s)

    may_call = asyncio.Event()
    may_call.set()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, may_call.clear)
    loop.add_signal_handler(signal.SIGUSR2, may_call.set)
    async with asyncio.TaskGroup() as group:
        group.create_task(late.run())
        next_s = time.monotonic()
        for number in itertools.count():
            if not may_call.is_set():
                await may_call.wait()
                next_s = time.monotonic()
            group.create_task(fresh(number) if number % 2 else _one(number, shared, late, deadline_s))
            next_s += 1 / per_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))


def main(arguments: Sequence[str]) -> None:
    """Call until killed."""
    asyncio.run(_run(arguments[0], float(arguments[1]), float(arguments[2]), os.environ[KEY_VARIABLE]))


if __name__ == "__main__":
    main(sys.argv[1:])
