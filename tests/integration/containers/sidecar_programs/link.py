"""Routes between the networks of its container, and impairs the packets from each of them to each other one.

`python3 -m sidecar_programs.link STATE` sets the state to that in the JSON argument, replacing the earlier one:

    {"gateways": ["10.1.1.2/24", ...], "paths": [["10.1.1.0/24", "10.1.2.0/24", DELAY_S, LOSS], ...]}

`gateways` become addresses of the container. A path leads from one network to another. Packets of a path that is not
listed are lost, without a message to their sender. Needs CAP_NET_ADMIN in that network, and iptables.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from . import delay
from .delayer import Delayer
from .shape import restore

_STATE: Final = Path("/run/link")


class Passage(NamedTuple):
    """A path with its impairment."""

    source: str
    target: str
    delay_s: float
    loss: float

    @property
    def key(self) -> str:
        """Text for a file name, which differs for another delay: a delayer has one delay for life."""
        return f"{self.source}_{self.target}_{self.delay_s}".replace("/", "-")


def rules(paths: Sequence[Passage], queues: Mapping[str, int]) -> Iterator[str]:
    """Yield the input of iptables-restore. `queues`: queue numbers by the keys of delayed paths."""
    yield "*mangle"
    for path in paths:
        if path.loss:
            # Behind the delayer, since the kernel splits what TCP offloads into packets for it.
            chance = f"-m statistic --mode random --probability {path.loss} -j DROP"
            yield f"-A POSTROUTING -s {path.source} -d {path.target} {chance}"
    yield "COMMIT"
    yield "*filter"
    yield ":FORWARD DROP [0:0]"
    for path in paths:
        queue = queues.get(path.key)
        verdict = "ACCEPT" if queue is None else f"NFQUEUE --queue-num {queue} --queue-bypass"
        yield f"-A FORWARD -s {path.source} -d {path.target} -j {verdict}"
    yield "COMMIT"


def main(gateways: Sequence[str], paths: Sequence[Passage]) -> None:
    _STATE.mkdir(exist_ok=True)
    running = {file.name.partition("_")[2]: file for file in _STATE.glob("*.pid")}
    wanted = {f"{path.key}.pid": path for path in paths if path.delay_s}
    unused = (number for number in count() if not any(_queue(file) == number for file in running.values()))
    files = {name: running.get(name) or _STATE / f"{next(unused)}_{name}" for name in wanted}
    for name, path in wanted.items():
        if name not in running:
            Delayer(files[name]).start(delay.__name__, str(path.delay_s), str(_queue(files[name])))
    ended = [Delayer(file) for name, file in running.items() if name not in wanted]
    for delayer in ended:
        delayer.stop_delaying()
    restore(rules(paths, {path.key: _queue(files[name]) for name, path in wanted.items()}))
    for delayer in ended:
        delayer.end()
    for gateway in gateways:
        _take(gateway)


def _queue(file: Path) -> int:
    return int(file.name.partition("_")[0])


def _take(gateway: str) -> None:
    """Add the address to the interface of its network, and remove the default route, which leads to the address."""
    found = subprocess.run(
        ["ip", "-json", "route", "get", gateway.partition("/")[0]], capture_output=True, check=True
    )
    (route,) = json.loads(found.stdout)
    if route.get("type") != "local":
        subprocess.run(["ip", "address", "add", gateway, "dev", route["dev"]], check=True)
    subprocess.run(["ip", "route", "flush", "default"], check=True)


if __name__ == "__main__":
    state = json.loads(sys.argv[1])
    main(state["gateways"], [Passage(*path) for path in state["paths"]])
