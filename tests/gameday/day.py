"""The regions of a game day while it runs: faults of their engines, and commands of their operators."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvmesh.redis_url import VARIABLE
from kvmesh.roles import CONFIG_PATH, SERVICE_PORTS
from tests.chaos.rig import images
from tests.gameday.shapes import FAULTS_FOLDER, TARGET, Shape, configs
from tests.gameday.views import HEALTHY, View, Watcher
from tests.integration.containers.link import Link
from tests.integration.containers.mesh import Options
from tests.integration.containers.regions import RegionsMesh
from tests.integration.live_mesh import until

FEDERATED_S_MAX: Final = 60.0
DRAINED_S_MAX: Final = 90.0
RECOVERED_S_MAX: Final = 300.0
"""A restarted region recovers in stages, for two and a half minutes."""

DRAINED: Final = "DRAINED"
METRICS_S_MAX: Final = 10.0
SETTLING_S: Final = 1.0
"""Between two looks at the settled tokens. They are settled when two looks are equal."""

_SETTLED: Final = re.compile(
    r'^kvmesh_frontend_settled_tokens_total\{[^}]*kind="(?:prompt|output)"[^}]*\} (\S+)$', re.MULTILINE
)


class OrderRefused(Exception):
    """A control plane refused a command. The text is its answer."""


class GameDay:
    """Running regions. `target` breaks; the others are `survivors`."""

    def __init__(self, mesh: RegionsMesh, shape: Shape, faults: Path) -> None:
        self.mesh = mesh
        self.shape = shape
        self.target = TARGET
        self.survivors = tuple(name for name in mesh.regions if name != TARGET)
        self.notes: list[str] = []
        """Remarks for a reader of the results."""
        self.background: asyncio.Task[None] | None = None
        """Task of an event that goes on until its healing."""
        self._faults = faults

    @property
    def link(self) -> Link:
        """The link between the regions and their clients."""
        return self.mesh.link

    def slow(self, region: str, text: str) -> None:
        """Inject the faults of `text` into the engines of a region, within 0.25 s. Empty: none."""
        write_faults(self._faults, region, text)

    async def command(self, region: str, *words: str) -> Any:
        """Run `kvmesh region` in the container of a region's control process. Raises OrderRefused."""
        mesh = self.mesh.regions[region]
        part, redis = mesh.parts["control-0"], mesh.parts["redis"].address
        command = ["kvmesh", "region", *words, "--json", "--config", CONFIG_PATH]
        environment = {VARIABLE: f"redis://{redis}/0"}
        done = await part.in_thread(
            lambda: part.docker.exec_run(command, environment=environment, workdir="/tmp", demux=True)
        )
        shown, errors = (each.decode(errors="replace") if each else "" for each in done.output)
        if done.exit_code:
            raise OrderRefused(f"kvmesh region {' '.join(words)}: {(errors or shown).strip()[-600:]}")
        return json.loads(shown)

    async def drained(self, region: str) -> None:
        """Drain a region, and wait until nothing runs there. Raises OrderRefused."""
        await self.command(region, "drain", region, "--reason", "game day")
        await self._seen(
            lambda view: view.by == view.region == region and view.declared == DRAINED,
            DRAINED_S_MAX,
            f"{region} is drained",
        )

    async def recovered(self, region: str) -> None:
        """Restore a region, and wait until each other one observes it HEALTHY again."""
        await self.command(region, "restore", region, "--reason", "game day is over")
        await self.seen_well(region)

    async def seen_well(self, *regions: str) -> None:
        """Wait until each of `regions` is observed HEALTHY at full weight by all others. Raises AssertionError."""
        for by in self.mesh.regions:
            for region in regions:
                if by != region:
                    await self._seen(
                        partial(_is_well, by, region), RECOVERED_S_MAX, f"{by} observes that {region} is well"
                    )

    async def _seen(self, is_wanted: Callable[[View], bool], timeout_s: float, what: str) -> None:
        """Wait until a control plane lists a region as wanted. Raises AssertionError."""
        watcher = Watcher(self.controls)

        async def is_there() -> bool:
            watcher.seen.clear()
            await watcher.look()
            return any(map(is_wanted, watcher.views(0.0)))

        try:
            await until(is_there, timeout_s, what, every_s=0.5)
        finally:
            await watcher.close()

    async def federated(self) -> None:
        """Wait until each control plane hears all others."""
        watcher = Watcher(self.controls)
        try:

            async def all_are_heard() -> bool:
                watcher.seen.clear()
                await watcher.look()
                heard = {(view.by, view.region) for view in watcher.views(0.0) if not view.is_stale}
                return heard >= {(a, b) for a in self.controls for b in self.controls if a != b}

            await until(all_are_heard, FEDERATED_S_MAX, "the regions hear each other", every_s=0.5)
        except AssertionError as error:
            seen = [
                f"{view.by} sees {view.region} {view.observed}, stale {view.is_stale}: {view.reason}"
                for view in watcher.views(0.0)
            ]
            raise AssertionError(f"{error}, but {'; '.join(seen) or 'no control plane answers'}") from None
        finally:
            await watcher.close()

    @property
    def controls(self) -> Mapping[str, Sequence[str]]:
        """Addresses of the control planes by region."""
        return {name: self.mesh.controls(name) for name in self.mesh.regions}

    async def settled(self) -> int:
        """Return the tokens that all running frontends have settled since their start, when no more are settled."""
        found = -1
        while found != (found := await self._settled()):
            await asyncio.sleep(SETTLING_S)
        return found

    async def _settled(self) -> int:
        pages = await asyncio.gather(
            *(
                asyncio.to_thread(_metrics, mesh.parts[name].ip)
                for mesh in self.mesh.regions.values()
                for name in mesh.running("frontend")
            )
        )
        return sum(settled_of(page) for page in pages)

    async def quiet(self) -> None:
        """End what goes on in the background."""
        if self.background is not None:
            self.background.cancel()
            await asyncio.gather(self.background, return_exceptions=True)
            self.background = None


def _is_well(by: str, region: str, view: View) -> bool:
    return (view.by, view.region, view.observed, view.weight) == (by, region, HEALTHY, 1.0)


def settled_of(page: str) -> int:
    """Return the settled tokens of prompts and outputs in the metrics of a frontend."""
    return sum(int(float(value)) for value in _SETTLED.findall(page))


def _metrics(ip: str) -> str:
    url = f"http://{ip}:{SERVICE_PORTS['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=METRICS_S_MAX) as answer:
        return bytes(answer.read()).decode()


def write_faults(folder: Path, region: str, text: str) -> None:
    """Write the faults of a region's engines at once."""
    draft = folder / f"{region}.draft"
    draft.write_text(text, encoding="utf-8")
    draft.rename(folder / region)


def new_day(shape: Shape, regions: Sequence[str], folder: Path, tag: str) -> GameDay:
    """Plan the regions in containers of the images `tag`; none runs yet. `folder` takes their files."""
    faults = folder / "faults"
    faults.mkdir(parents=True, exist_ok=True)
    faults.chmod(0o755)
    for region in regions:
        write_faults(faults, region, "")
    options = Options(images=images(tag), mounts={str(faults): FAULTS_FOLDER})
    mesh = RegionsMesh(configs(shape, tuple(regions)), folder, options)
    return GameDay(mesh, shape, faults)
