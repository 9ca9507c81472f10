"""The clients of a game day inside a station: they play a file of conversations with `kvmesh.client`.

`python -m tests.gameday.playing PLAN` reads a `Play`, and writes a JSON line for each turn to its file of calls. It ends
when its stop file exists and the open turns have ended. Beside the calls it writes the longest delay of its event loop, in
seconds, to a file with the suffix .late.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from kvmesh.client import Client, GenerateError, GenerationStream, RetryPolicy
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.chaos.cpu import Lateness
from tests.gameday import calls
from tests.gameday.calls import Call
from tests.gameday.conversations import Conversation, Turn
from tests.gameday.shapes import key_of, tenant_of

DEADLINE_S: Final = 30.0
LOOK_S: Final = 0.1


class Play(msgspec.Struct, frozen=True):
    """The file of a station."""

    frontends: Mapping[str, tuple[str, ...]]
    """Region -> addresses."""
    begin_s: float
    """Begin of the load, on the monotonic clock of the machine."""
    calls: str
    """File of the calls."""
    stop: str
    """File that ends the load."""
    conversations: tuple[Conversation, ...]
    shows_refusals: bool = False
    """The clients hand each refusal to their caller at once."""
    is_pressed: bool = False
    """Without pauses, each conversation behind the one before it in its lane: the load that measures a capacity."""
    lanes: int = 0


class Player:
    """Plays the conversations until `stop`."""

    def __init__(self, play: Play, file: BinaryIO) -> None:
        self._play = play
        self._file = file
        self._clients: dict[tuple[str, str], Client] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Return when the stop file exists and the open turns have ended."""
        async with AsyncExitStack() as stack:
            for each in self._play.conversations:
                caller = each.home, tenant_of(each.kind, each.home)
                if caller not in self._clients:
                    self._clients[caller] = await stack.enter_async_context(self._client(*caller))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                if self._play.is_pressed:
                    for lane in range(self._play.lanes):
                        group.create_task(self._press(self._play.conversations[lane :: self._play.lanes]))
                else:
                    for each in self._play.conversations:
                        group.create_task(self._arrive(each))

    def _client(self, home: str, tenant: str) -> Client:
        policy = RetryPolicy(retry_after_max_s=0.0) if self._play.shows_refusals else RetryPolicy()
        return Client(regions=self._play.frontends, prefer=home, key=key_of(tenant), retry_policy=policy)

    async def _watch(self) -> None:
        stop = Path(self._play.stop)
        while not stop.exists():
            await asyncio.sleep(LOOK_S)
        self._stopping.set()

    async def _pause(self, until_s: float) -> bool:
        """Wait until a time; return False if the load ends before it."""
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await self._stopping.wait()
        except TimeoutError:
            return True
        return False

    async def _press(self, conversations: Sequence[Conversation]) -> None:
        await self._pause(self._play.begin_s)
        for each in conversations:
            await self._converse(each)

    async def _arrive(self, conversation: Conversation) -> None:
        if await self._pause(self._play.begin_s + conversation.arrives_s):
            await self._converse(conversation)

    async def _converse(self, conversation: Conversation) -> None:
        said: list[int] = []
        for number, turn in enumerate(conversation.turns):
            pause_s = 0.0 if self._play.is_pressed else turn.pause_s
            if self._stopping.is_set() or not await self._pause(time.monotonic() + pause_s):
                return
            said += turn.message
            await self._ask(conversation, number, turn, said)
            said += turn.outputs[conversation.version]

    async def _ask(self, conversation: Conversation, number: int, turn: Turn, said: Sequence[int]) -> None:
        client = self._clients[conversation.home, tenant_of(conversation.kind, conversation.home)]
        sent_s, first_s, error = time.monotonic(), None, None
        stream = client.generate(
            prompt_tokens=said,
            max_output_tokens=turn.output_tokens,
            seed=conversation.seed,
            temperature=conversation.temperature,
            session_id=f"{conversation.home}-{conversation.number}",
            explain=True,
            deadline_s=DEADLINE_S,
        )
        try:
            async with stream:
                async for chunk in stream:
                    if chunk.ids and first_s is None:
                        first_s = time.monotonic()
        except GenerateError as failed:
            error = failed
        self._write(conversation, number, turn, said, stream, sent_s, first_s, error)

    def _write(
        self,
        conversation: Conversation,
        number: int,
        turn: Turn,
        said: Sequence[int],
        stream: GenerationStream,
        sent_s: float,
        first_s: float | None,
        error: GenerateError | None,
    ) -> None:
        ids, version = tuple(stream.ids), stream.started.model_version if stream.started else ""
        expected = turn.outputs.get(version, ())
        usage = stream.finish.usage if stream.finish else pb.Usage()
        explained = stream.finish.explanation if stream.finish else pb.Explanation()
        call = Call(
            conversation.number,
            number,
            conversation.home,
            conversation.kind,
            sent_s,
            time.monotonic(),
            first_s,
            calls.outcome_of(
                error="" if error is None else error.code or "LOST",
                reason="" if error is None or error.reason == error.code else error.reason,
                has_retry_after=error is not None and error.retry_after_s is not None,
                has_tokens=bool(ids),
                is_right=ids == expected[: len(ids)],
                is_whole=len(ids) == len(expected),
            ),
            "" if error is None else error.reason,
            version,
            explained.region,
            tuple(each.region for each in explained.attempts),
            stream.sends,
            stream.resumes,
            usage.prompt_token_count,
            usage.cached_token_count,
            len(ids),
            len(said),
            turn.output_tokens,
        )
        self._file.write(msgspec.json.encode(call) + b"\n")


def _opened(path: Path) -> BinaryIO:
    return path.open("wb")


async def main(plan: str) -> None:
    """Play a file to its end."""
    play = msgspec.json.decode(Path(plan).read_bytes(), type=Play)
    lateness = Lateness()
    with _opened(Path(play.calls)) as file:
        watching = asyncio.create_task(lateness.run())
        await Player(play, file).run()
        watching.cancel()
    Path(play.calls).with_suffix(".late").write_text(f"{lateness.longest_s}", encoding="ascii")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
