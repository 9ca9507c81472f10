"""Sets the faults of its container's network to those in the arguments, replacing the earlier ones.

`python3 -m sidecar_programs.shape DELAY_S LOSS [all | IP]...` cuts the network off from all or from these
addresses. The network is slow unless DELAY_S and LOSS are 0. Prints the delay method: netem, queue or not.
Needs CAP_NET_ADMIN and CAP_NET_RAW in that network, and iptables. No other network is changed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from . import delay
from .delayer import Delayer

_STATE: Final = Path("/run/shape")
_DELAYER: Final = _STATE / "delayer.pid"
_NETEM: Final = _STATE / "netem"
_NOBODYS_QUEUE: Final = 9


def rules(cuts: Sequence[str], queue_loss: float | None) -> Iterator[str]:
    """Yield the input of iptables-restore.

    With `queue_loss`, packets pass the delayer and this share is lost.
    """
    yield "*mangle"
    if queue_loss is not None:
        # Outbound packets are lost after the delayer: the sender's call has returned, so its kernel does not
        # learn of the loss.
        chance = f"-m statistic --mode random --probability {queue_loss} -j DROP"
        yield f"-A PREROUTING ! -i lo {chance}"
        yield f"-A POSTROUTING ! -o lo {chance}"
    yield "COMMIT"
    yield "*filter"
    yield "-A INPUT -i lo -j ACCEPT"
    yield "-A OUTPUT -o lo -j ACCEPT"
    if queue_loss is not None:
        yield f"-A OUTPUT -m mark --mark {delay.MARK} -j ACCEPT"
    for peer in cuts:
        yield "-A INPUT -j DROP" if peer == "all" else f"-A INPUT -s {peer} -j DROP"
        # DROP would fail the sender's call. A queue without a reader loses packets silently, as a wire does.
        lost = f"-j NFQUEUE --queue-num {_NOBODYS_QUEUE}"
        yield f"-A OUTPUT {lost}" if peer == "all" else f"-A OUTPUT -d {peer} {lost}"
    if queue_loss is not None:
        yield f"-A INPUT -j NFQUEUE --queue-num {delay.IN_QUEUE} --queue-bypass"
        yield f"-A OUTPUT -j NFQUEUE --queue-num {delay.OUT_QUEUE} --queue-bypass"
    yield "COMMIT"


def netem(delay_s: float, loss: float) -> list[list[str]]:
    """Return the commands for a delay by the kernel's netem; inbound packets pass an ifb device first."""
    shaped = f"netem limit 100000 delay {delay_s * 1000:g}ms loss random {loss * 100:g}%".split()
    redirect = ["matchall", "action", "mirred", "egress", "redirect", "dev", "shape0"]
    return [
        ["tc", "qdisc", "add", "dev", "eth0", "root", *shaped],
        ["ip", "link", "add", "shape0", "type", "ifb"],
        ["ip", "link", "set", "shape0", "up"],
        ["tc", "qdisc", "add", "dev", "shape0", "root", *shaped],
        ["tc", "qdisc", "add", "dev", "eth0", "ingress"],
        ["tc", "filter", "add", "dev", "eth0", "parent", "ffff:", *redirect],
    ]


_NO_NETEM: Final = [
    ["tc", "qdisc", "del", "dev", "eth0", "root"],
    ["tc", "qdisc", "del", "dev", "eth0", "ingress"],
    ["ip", "link", "del", "shape0"],
]


def main(delay_s: float, loss: float, cuts: Sequence[str]) -> int:
    _STATE.mkdir(exist_ok=True)
    if _NETEM.exists():
        _try(_NO_NETEM)
        _NETEM.unlink()
    delayer = Delayer(_DELAYER)
    had_delayer = delayer.is_started
    if had_delayer:
        delayer.stop_delaying()
    how, queue_loss = "not", None
    if delay_s or loss:
        if all(_try([command]) for command in netem(delay_s, loss)):
            how = "netem"
            _NETEM.touch()
        else:
            _try(_NO_NETEM)
            how, queue_loss = "queue", loss
    if had_delayer:
        restore(rules(cuts, None))
        delayer.end()
    if how == "queue":
        delayer.start(delay.__name__, str(delay_s))
    restore(rules(cuts, queue_loss))
    print(how)
    return 0


def restore(lines: Iterator[str]) -> None:
    """Replace the rules of the tables in `lines`, the input of iptables-restore."""
    subprocess.run(["iptables-restore"], input="\n".join(lines) + "\n", text=True, check=True)


def _try(commands: Sequence[Sequence[str]]) -> bool:
    """Run all commands, also after one that fails; return True if all succeeded."""
    return (
        sum(subprocess.run(command, capture_output=True, check=False).returncode for command in commands) == 0
    )


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
