"""The clients of a game day as its runner sees them: a program in a station, and its files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.results import BenchError
from tests.gameday import calls
from tests.gameday.calls import Call
from tests.gameday.conversations import Conversation
from tests.gameday.day import GameDay
from tests.gameday.playing import Play
from tests.integration.containers.station import OUT, Station


@dataclass(slots=True)
class Clients:
    """The clients in a station: their files, and their program."""

    station: Station
    folder: Path
    """The station's folder on this machine."""
    playing: asyncio.Task[str] | None = None
    late_s: float = 0.0

    async def start(self, play: Play, timeout_s: float) -> None:
        """Start the program."""
        (self.folder / "stop").unlink(missing_ok=True)
        (self.folder / "plan.json").write_bytes(msgspec.json.encode(play))
        program = ("python", "-m", "tests.gameday.playing", f"{OUT}/plan.json")
        self.playing = asyncio.create_task(self.station.run(*program, timeout_s=timeout_s))

    async def stop(self) -> list[Call]:
        """End the load, and return all calls when the open turns have ended. Raises AssertionError with its output."""
        assert self.playing is not None, "the clients were not started"
        (self.folder / "stop").touch()
        await self.playing
        self.late_s = float((self.folder / "calls.late").read_text(encoding="ascii"))
        return calls.read(self.folder / "calls.jsonl")

    async def until(self, at_s: float) -> None:
        """Wait until a time of the monotonic clock. Raises AssertionError if the program ends before it."""
        assert self.playing is not None, "the clients were not started"
        done, _ = await asyncio.wait({self.playing}, timeout=max(0.0, at_s - time.monotonic()))
        if done:
            raise BenchError(f"the clients ended early: {self.playing.result()[-2000:]}")


def play_of(
    day: GameDay, begin_s: float, conversations: Sequence[Conversation], **options: int | bool
) -> Play:
    """Return the file of a station that plays conversations. `options`: further fields of Play."""
    return Play(
        frontends={name: tuple(day.mesh.frontends(name)) for name in day.mesh.regions},
        begin_s=begin_s,
        calls=f"{OUT}/calls.jsonl",
        stop=f"{OUT}/stop",
        conversations=tuple(conversations),
        **options,  # type: ignore[arg-type]  # two optional fields
    )
