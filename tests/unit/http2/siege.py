"""A server under attack: a hostile connection, a bystander on another one, and what the server holds of the attacker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvmesh.http2.connection import Connection
from kvmesh.http2.server import BatchedServer
from tests.patience import patience
from tests.raw_http2 import RawConnection, RawStream
from tests.unit.http2.echo import Echo, echoing

UNARY, SPLIT, LARGE, JOIN, BOTH = (
    f"/test.Echo/{name}" for name in ("Unary", "Split", "Large", "Join", "Both")
)


@dataclass(slots=True)
class Siege:
    """The parts. `attacker` has sent its preface, and the server has read it."""

    server: BatchedServer
    echo: Echo
    address: str
    attacker: RawConnection
    bystander: RawConnection
    target: Connection
    """The server's end of the attacker's connection."""

    async def answered(self) -> RawStream:
        """Return a call of the bystander, once it ended."""
        stream = self.bystander.call(UNARY)
        await stream.send_message(b"still here")
        await stream.ended()
        return stream

    @property
    def output_bytes(self) -> int:
        """Bytes that the server holds for the attacker, beside messages of its calls."""
        transport: Any = self.target._transport
        return int(transport.get_write_buffer_size()) + self.target._codec.waiting_bytes()


async def until(condition: Callable[[], bool], bound_s: float = 5.0) -> None:
    """Let the loop turn until `condition`. Raises TimeoutError."""
    async with patience(bound_s):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def besieged(*, streams_max: int = 1_000, **settings: Any) -> AsyncIterator[Siege]:
    """Yield a siege. At its end the bystander is served, and the server has no task, stream or error left."""
    loop = asyncio.get_running_loop()
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    tasks_before = asyncio.all_tasks()
    async with echoing(streams_max=streams_max) as (server, echo, address):  # noqa: SIM117  # so the inner ones end first
        async with RawConnection.connect(address) as bystander:
            await bystander.ping()
            (first,) = server._connections
            async with RawConnection.connect(address, **settings) as attacker:
                await attacker.ping()
                (target,) = server._connections - {first}
                siege = Siege(server, echo, address, attacker, bystander, target)
                yield siege
                if server._stopping is None:
                    assert (await siege.answered()).messages == [b"still here"]
            await until(lambda: server._connections <= {first})
            assert not target.streams
            await until(lambda: not target._calls)
            assert not target._stalled
            await until(lambda: not echo.running)
    await until(lambda: asyncio.all_tasks() <= tasks_before)
    assert not errors, errors
