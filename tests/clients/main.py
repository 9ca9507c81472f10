"""The command: `python -m tests.clients`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from bench.environments import Unavailable
from tests.clients import openai_cases, openai_clients, stock
from tests.clients.cases import CASES, drains, restarted
from tests.clients.driver import Client
from tests.clients.guided_mesh import guided_mesh
from tests.clients.long_streams import long_streams
from tests.clients.site import Site, running_site
from tests.clients.tools import TOOLS

LOGS: Final = Path(".kvmesh/clients")
ENVOY: Final = "envoy"
OF_ENVOY: Final = tuple(name for name in CASES if name not in {"TLS", "large"})
"""Cases of the frontend that Envoy is in front of."""
LONG_CLIENTS: Final = ("grpcio aio", "grpcio sync", "grpc-js", "ruby")

app = typer.Typer(add_completion=False, help="Calls a mesh with stock clients of gRPC and OpenAI's API.")


class Table:
    """Prints a line for each case, and counts."""

    def __init__(self) -> None:
        self.failed = 0
        self.skipped = 0

    async def row(self, client: str, case: str, running: Awaitable[str]) -> None:
        """Run a case and print its line."""
        try:
            self.line(client, case, await running)
        except (AssertionError, Unavailable) as error:
            self.line(client, case, error)

    def line(self, client: str, case: str, seen: str | Exception) -> None:
        """Print one line."""
        verdict = "ok"
        if isinstance(seen, Unavailable):
            verdict, self.skipped = "SKIPPED", self.skipped + 1
        elif isinstance(seen, Exception):
            verdict, self.failed = "FAILED", self.failed + 1
        typer.echo(f"{client:<13} {case:<12} {verdict:<8} {seen}")


@app.command()
def run(
    only: Annotated[str, typer.Option(help="Some clients by name: ruby,envoy,nghttp.")] = "",
    cases: Annotated[str, typer.Option(help="Some cases by name: answer,drain.")] = "",
    long: Annotated[
        bool, typer.Option("--long", help="Only the 1,000 streams on one connection of each client.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Length of these streams in seconds.", min=1)] = 60.0,
) -> None:
    """Run the clients; status 1 if one of them saw something else than it must."""
    names = [*stock.NAMES, ENVOY, *TOOLS, *openai_clients.NAMES]
    chosen = _chosen(only, names, "--only")
    known = dict.fromkeys((*CASES, "drain", "restart", *openai_cases.CASES))
    wanted = _chosen(cases, list(known), "--cases")
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    table = Table()
    asyncio.run(_long(table, chosen, seconds) if long else _run(table, chosen, wanted))
    typer.echo(f"{table.failed} failed, {table.skipped} skipped; logs: {LOGS.resolve()}")
    if table.failed:
        raise typer.Exit(1)


def _chosen(text: str, known: Sequence[str], option: str) -> Sequence[str]:
    """Return the names in `text`, or all. Raises BadParameter for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}", param_hint=option)
    return names or known


async def _run(table: Table, chosen: Sequence[str], wanted: Sequence[str]) -> None:
    async with running_site(LOGS.resolve()) as site, _clients(table, chosen, site) as clients:
        for client in clients.values():
            for name in wanted:
                if name in CASES and (client.name != ENVOY or name in OF_ENVOY):
                    await table.row(client.name, name, CASES[name](site, client))
        for name in chosen:
            if name in TOOLS:
                await table.row(name, "all", TOOLS[name](site))
        await _openai(table, [name for name in openai_clients.NAMES if name in chosen], wanted, site)
        direct = [client for client in clients.values() if client.name != ENVOY]
        for name, joint in (("drain", drains), ("restart", restarted)):
            if name in wanted and direct:
                for client_name, seen in (await joint(site, direct)).items():
                    table.line(client_name, name, seen)


async def _openai(table: Table, chosen: Sequence[str], wanted: Sequence[str], site: Site) -> None:
    """Run the cases of the clients of OpenAI's API, those with a JSON schema beside a mesh whose engines offer it."""
    cases = {name: case for name, case in openai_cases.CASES.items() if name in wanted}
    if not chosen or not cases:
        return
    async with AsyncExitStack() as stack:
        guided = site.http()
        if "schema" in cases:
            guided = await stack.enter_async_context(guided_mesh(LOGS.resolve() / "guided"))
        for name in chosen:
            try:
                words = await asyncio.to_thread(openai_clients.command, name)
            except Unavailable as error:
                table.line(name, "all", error)
                continue
            async with openai_clients.running(name, words, site, LOGS) as client:
                for title, case in cases.items():
                    await table.row(name, title, case(site, client, openai_clients.KINDS[name], guided))


async def _long(table: Table, chosen: Sequence[str], seconds: float) -> None:
    names = [name for name in chosen if name in LONG_CLIENTS]
    async with running_site(LOGS.resolve()) as site, _clients(table, names, site) as clients:
        for client in clients.values():
            await table.row(client.name, "long streams", long_streams(site, client, seconds))


@asynccontextmanager
async def _clients(table: Table, chosen: Sequence[str], site: Site) -> AsyncIterator[Mapping[str, Client]]:
    """Start the chosen clients that can be had; the table gets a line for each other one."""
    started: dict[str, Client] = {}
    async with AsyncExitStack() as stack:
        for name in (*stock.NAMES, ENVOY):
            if name not in chosen:
                continue
            try:
                through = await asyncio.to_thread(site.envoy) if name == ENVOY else ""
                command = await asyncio.to_thread(stock.command, stock.NAMES[0] if name == ENVOY else name)
            except Unavailable as error:
                table.line(name, "all", error)
                continue
            client = Client(name, command, LOGS / f"client-{name.replace(' ', '-')}.log", through=through)
            await client.start()
            stack.push_async_callback(client.stop)
            started[name] = client
        yield started


def main() -> None:
    """Run the command."""
    app()
