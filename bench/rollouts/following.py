"""Starts a rollout with the CLI and follows it through ControlPlaneService, until it is final."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from bench.results import BenchError
from bench.rollouts.mesh import FRONTENDS, NEXT, YOUNG, command_line
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc, snapshot_pb2
from kvmesh.snapshot.content import RolloutState

CALL_S: Final = 5.0
SILENCE_S: Final = 30.0
"""Longest time without an answer of the control process."""
BACK: Final = (RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK, RolloutState.ABORTED)


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of `kvmesh rollout start`."""

    steps: str = "10,50,100"
    bake_s: int = 60
    bake_max_s: int = 300
    keep_old_s: int = 10

    def words(self) -> list[str]:
        """Return the command line."""
        times = {"bake": self.bake_s, "bake-max": self.bake_max_s, "keep-old": self.keep_old_s}
        options = [word for name, value in times.items() for word in (f"--{name}", f"{value}s")]
        return ["rollout", "start", "--to", NEXT, "--baseline", YOUNG, "--steps", self.steps, *options]


def start(config_path: Path, settings: Settings) -> str:
    """Start a rollout and return its id. Raises BenchError with the refusal."""
    return str(_run(config_path, [*settings.words(), "--json"])["rollout"]["rollout"])


def pause(config_path: Path) -> None:
    """Pause the running rollout. Raises BenchError with the refusal."""
    _run(config_path, ["rollout", "pause", "--json"])


def _run(config_path: Path, words: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        command_line(config_path, *words), capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise BenchError(f"kvmesh {' '.join(words)}: {done.stdout.strip()} {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a rollout, and the reason for it."""

    state: str
    step: int
    """At the decision."""
    weight_percent: int
    """Before the decision."""
    gate: str
    """Gates that failed, by commas. Empty: the rollout was promoted, or no gate decided."""
    reason: str


class Follower:
    """See the module. `poll` asks for the state; the fields keep what was seen. Times are Unix time."""

    def __init__(self, address: str, rollout: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = control_pb2_grpc.ControlPlaneServiceStub(self._channel)
        self._rollout = rollout
        self._heard_s = time.monotonic()
        self.latest = pb.Rollout()
        self.weights: list[tuple[float, int]] = []
        """Time and weight of the canary, at each poll."""
        self.acked_s: float | None = None
        """Time at which each frontend had applied weight 0, after the rollout was taken back."""

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    @property
    def state(self) -> RolloutState:
        """The state at the last poll."""
        return RolloutState(self.latest.state)

    def poll(self) -> None:
        """Ask for the state. Raises BenchError after SILENCE_S without an answer."""
        try:
            asked = pb.GetRolloutRequest(rollout=self._rollout)
            self.latest = self._stub.GetRollout(asked, timeout=CALL_S).rollout
            if self.state in BACK and self.acked_s is None and self._is_zero_applied():
                self.acked_s = time.time()
        except grpc.RpcError as error:
            if time.monotonic() - self._heard_s > SILENCE_S:
                raise BenchError(
                    f"the control process has not answered for {SILENCE_S:g} s: {error}"
                ) from None
            return
        self._heard_s = time.monotonic()
        self.weights.append((time.time(), self.latest.weight_percent))

    def weight_max(self, since_s: float) -> int:
        """Return the largest weight of the canary from a time on, and the one in force at that time."""
        before = [weight for at_s, weight in self.weights if at_s < since_s][-1:]
        return max([*before, *(weight for at_s, weight in self.weights if at_s >= since_s)], default=0)

    def ending(self) -> Ending:
        """Return the end, as far as it was seen."""
        return ending(self.latest)

    def _is_zero_applied(self) -> bool:
        shown = self._stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=CALL_S).snapshot
        if any(pool.pool == NEXT and pool.weight_percent for pool in shown.content.pools):
            return False
        found = self._stub.ListReceivers(pb.ListReceiversRequest(), timeout=CALL_S).receivers
        applied = [each.is_current for each in found if each.role == "frontend"]
        return len(applied) == FRONTENDS and all(applied)


def ending(rollout: pb.Rollout) -> Ending:
    """Return the end of a rollout. Pure."""
    state = RolloutState(rollout.state).name
    changes = list(rollout.changes)
    at = next((n for n, each in enumerate(changes) if RolloutState(each.state) in BACK), None)
    if at is None:
        return Ending(state, rollout.step, rollout.weight_percent, "", rollout.reason)
    change = changes[at]
    failed = [gate.name for gate in change.verdict.gates if gate.result == "fails"]
    if not failed and change.reason.startswith("golden prompts"):
        failed = ["golden"]
    step = change.step
    percent = rollout.settings.steps_percent[step - 1] if step else 0
    return Ending(state, step, percent, ", ".join(failed), change.reason)


def is_final(rollout: pb.Rollout) -> bool:
    """True if the rollout is over. Pure."""
    return rollout.state != snapshot_pb2.ROLLOUT_STATE_UNSPECIFIED and RolloutState(rollout.state).is_final
