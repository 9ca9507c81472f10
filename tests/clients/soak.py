"""A soak of the batched edge: connections come and go, and the memory of the frontend stays flat.

Before it, idle connections show the memory that each takes.

`python -m tests.clients.soak --minutes 20`
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import psutil
import typer

from bench import pages
from tests.chaos import machine
from tests.clients import idle
from tests.clients.cases import CHECK, MODEL
from tests.clients.site import GENERATE, PLAIN, Site, request, running_site
from tests.file_limit import raise_file_limit
from tests.raw_http2 import RawConnection

CONNECTIONS: Final = 1_000
LIFE_S: Final = (2.0, 30.0)
CALLS_MAX: Final = 4
SAMPLE_S: Final = 5.0
GROWN_MB_MAX: Final = 8.0
"""Largest growth from the second quarter of the run to the last one."""
FILES_MAX: Final = 16
"""Most files that the frontend may have open beyond those of its start, once all clients have left."""
SETTLE_S: Final = 15.0
RETRY_S: Final = 1.0
"""Pause of a client whose connection failed."""
MB: Final = 1 << 20
BEGIN: Final = "<!-- written by make soak-edge: begin -->"
END: Final = "<!-- written by make soak-edge: end -->"
COLUMNS: Final = ("minute", "connections", "opened", "calls", "cancelled", "files", "memory, MB")

app = typer.Typer(add_completion=False)


class Row(msgspec.Struct, kw_only=True):
    """The state after a minute. Counts are sums since the start."""

    minute: float
    connections: int
    opened: int
    calls: int
    cancelled: int
    files: int
    memory_mb: float

    def cells(self) -> Sequence[str]:
        """Return the cells of its line, in the order of COLUMNS."""
        return (
            f"{self.minute:g}",
            f"{self.connections:,}",
            f"{self.opened:,}",
            f"{self.calls:,}",
            f"{self.cancelled:,}",
            f"{self.files:,}",
            f"{self.memory_mb:.1f}",
        )


class Visitors:
    """CONNECTIONS clients at a time. A client that leaves makes room for the next one."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._rng = random.Random(seed)
        self.connected = 0
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    async def stay(self) -> None:
        """Send clients one after the other, until cancelled."""
        await asyncio.sleep(self._rng.uniform(0, LIFE_S[0]))
        while True:
            try:
                await self._visit(self._rng.uniform(*LIFE_S))
            except (OSError, TimeoutError) as error:
                self.faults[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(RETRY_S)

    async def _visit(self, life_s: float) -> None:
        if self._rng.random() < 0.05:
            await self._half_open(life_s)
            return
        async with RawConnection.connect(self._address) as connection:
            self.connected += 1
            self.counts["opened"] += 1
            try:
                calls = self._rng.randint(0, CALLS_MAX)
                for _ in range(calls):
                    await asyncio.sleep(life_s / (calls + 1))
                    await self._call(connection)
                await asyncio.sleep(life_s / (calls + 1))
                if self._rng.random() < 0.2:  # leaves in the middle of a call
                    stream = connection.call(GENERATE)
                    await stream.send_message(self._request(2_000))
                    self.counts["cancelled"] += 1
            finally:
                self.connected -= 1

    async def _half_open(self, life_s: float) -> None:
        """Connect, and leave with a part of a preface."""
        _, writer = await asyncio.open_connection(*self._address.rsplit(":", 1))
        self.counts["opened"] += 1
        try:
            writer.write(b"PRI * HTTP/2.0\r\n")
            await asyncio.sleep(min(life_s, 5.0))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _call(self, connection: RawConnection) -> None:
        kind = self._rng.random()
        if kind < 0.7:
            await self._ends(connection, CHECK, b"", "0")
        elif kind < 0.85:
            await self._ends(connection, GENERATE, request(output_tokens=8, seed=1, model=MODEL), "3")
        elif kind < 0.95:
            await self._ends(connection, GENERATE, self._request(8), "0")
        else:
            stream = connection.call(GENERATE)
            await stream.send_message(self._request(2_000))
            await stream.until(lambda: bool(stream.messages) or stream.has_ended)
            stream.reset()
            connection.forget(stream)
            self.counts["cancelled"] += 1

    async def _ends(self, connection: RawConnection, path: str, message: bytes, status: str) -> None:
        stream = connection.call(path)
        await stream.send_message(message)
        await stream.until(lambda: stream.has_ended)
        self.counts["calls"] += 1
        if stream.trailers.get("grpc-status") != status:
            self.faults[f"{path}: {dict(stream.trailers)}"] += 1

    def _request(self, output_tokens: int) -> bytes:
        return request(output_tokens=output_tokens, seed=self._rng.getrandbits(30))


class Soak:
    """One run against the frontend of `site`."""

    def __init__(self, site: Site, minutes: float, seed: int) -> None:
        self._site = site
        self._minutes = minutes
        self._visitors = Visitors(site.address(), seed)
        self._frontend = psutil.Process(site.mesh.parts[PLAIN].pid)
        self._memory_mb: list[float] = []
        self.idle_kb = 0.0
        """Memory of an idle connection."""
        self.rows: list[Row] = []

    async def run(self) -> list[str]:
        """Run, and return what is wrong. Prints a line each minute."""
        files = self._frontend.num_fds()
        self.idle_kb = await idle.connection_kb(self._site.address(), self._frontend)
        typer.echo(f"an idle connection takes {self.idle_kb:.1f} KB")
        visiting = [asyncio.create_task(self._visitors.stay()) for _ in range(CONNECTIONS)]
        try:
            await self._watch()
        finally:
            for each in visiting:
                each.cancel()
            await asyncio.gather(*visiting, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)
        wrong = [f"{count} x {text}" for text, count in self._visitors.faults.most_common(10)]
        if self.idle_kb > idle.CONNECTION_KB_MAX:
            allowed = f"allowed are {idle.CONNECTION_KB_MAX:g} KB"
            wrong.append(f"an idle connection took {self.idle_kb:.1f} KB; {allowed}")
        grown_mb = self.grown_mb()
        if grown_mb > GROWN_MB_MAX:
            wrong.append(f"the memory grew by {grown_mb:.1f} MB; allowed are {GROWN_MB_MAX:g} MB")
        if (left := self._frontend.num_fds() - files) > FILES_MAX:
            wrong.append(f"{left} files more than at the start are open; allowed are {FILES_MAX}")
        try:
            await self._site.mesh.idle(SETTLE_S)
        except AssertionError as error:
            wrong.append(str(error))
        return wrong

    def grown_mb(self) -> float:
        """Return the growth of the median memory from the second quarter of the run to the last one."""
        quarter = len(self._memory_mb) // 4
        if not quarter:
            return 0.0
        return statistics.median(self._memory_mb[-quarter:]) - statistics.median(
            self._memory_mb[quarter : 2 * quarter]
        )

    async def _watch(self) -> None:
        began_s = time.monotonic()
        next_row_s = 60.0
        while (elapsed_s := time.monotonic() - began_s) < self._minutes * 60:
            await asyncio.sleep(SAMPLE_S)
            self._memory_mb.append(self._frontend.memory_info().rss / MB)
            if elapsed_s + SAMPLE_S >= next_row_s:
                self._note(next_row_s / 60)
                next_row_s += 60.0

    def _note(self, minute: float) -> None:
        counts = self._visitors.counts
        row = Row(
            minute=minute,
            connections=self._visitors.connected,
            opened=counts["opened"],
            calls=counts["calls"],
            cancelled=counts["cancelled"],
            files=self._frontend.num_fds(),
            memory_mb=self._memory_mb[-1],
        )
        self.rows.append(row)
        typer.echo("  ".join(f"{cell:>12}" for cell in row.cells()))


@app.command()
def run(
    minutes: Annotated[float, typer.Option(help="Length in minutes.", min=1)] = 20.0,
    write: Annotated[Path | None, typer.Option(help="Page with the marked section to write again.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the clients.", min=1)] = 1,
    logs: Annotated[Path, typer.Option(help="Folder for the logs of the mesh.")] = Path(".kvmesh/soak-edge"),
) -> None:
    """Run; status 1 if memory or files grow, or a call ends otherwise than it must."""
    if write is not None:
        pages.put(write.read_text(encoding="utf-8"), [], BEGIN, END)
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    raise_file_limit()
    soak, wrong = asyncio.run(_run(minutes, seed, logs.resolve()))
    grown_mb = soak.grown_mb()
    typer.echo(f"memory {grown_mb:+.1f} MB from the second quarter to the last; logs: {logs.resolve()}")
    for each in wrong:
        typer.echo(f"WRONG: {each}")
    if write is not None:
        lines = _section(soak, minutes, wrong, seed)
        text = pages.put(write.read_text(encoding="utf-8"), lines, BEGIN, END)
        write.write_text(text, encoding="utf-8")
    if wrong:
        raise typer.Exit(1)


async def _run(minutes: float, seed: int, logs: Path) -> tuple[Soak, list[str]]:
    async with running_site(logs) as site:
        typer.echo("  ".join(f"{name:>12}" for name in COLUMNS))
        soak = Soak(site, minutes, seed)
        return soak, await soak.run()


def _section(soak: Soak, minutes: float, wrong: Sequence[str], seed: int) -> list[str]:
    date = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d")
    return [
        f"`make soak-edge` on {date}, commit {machine.commit()}, {minutes:g} minutes, seed {seed}.",
        f"{machine.about()}.",
        "",
        f"Memory of the frontend from the second quarter of the run to the last one: {soak.grown_mb():+.1f} MB.",
        f"Memory of an idle connection, over {idle.CONNECTIONS:,} of them: {soak.idle_kb:.1f} KB.",
        *(f"Violated: {each}" for each in wrong),
        "",
        *pages.table(COLUMNS, (row.cells() for row in soak.rows)),
    ]


if __name__ == "__main__":
    app()
