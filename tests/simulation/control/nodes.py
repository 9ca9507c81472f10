"""The simulated processes: control processes and receivers."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core import ControlCore
from kvmesh.control.v1 import shadow_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.fence import Fence
from kvmesh.snapshot.watch_outbox import WatchOutbox
from services.frontend.requests.observations import Observations
from tests.simulation.control.simulated_redis import Copies
from tests.simulation.control.traffic import Traffic


@dataclass
class Node:
    """What control processes and receivers share: links, pauses, crashes."""

    name: str
    boot: int = 0
    is_up: bool = True
    paused_until_s: float = 0.0
    has_redis: bool = True
    keeps_state: bool = False
    """True if a restart finds a state folder."""

    @property
    def boot_id(self) -> str:
        """Boot id of the present start."""
        return f"{self.name}#{self.boot}"


@dataclass
class Control(Node):
    """One control process."""

    core: ControlCore = field(init=False)
    copies: Copies = field(default_factory=Copies)
    wall_offset_s: float = 0.0
    is_leaving: bool = False
    """True after SIGTERM: it claims nothing more."""
    led: bool = False
    """True if it led after its last actions."""


@dataclass
class Peer(Node):
    """One receiver with its fence."""

    role: str = "frontend"
    pool: str = ""
    fence: Fence = field(default_factory=Fence)
    dialed: str = ""
    """Control process of the open stream; empty: none."""
    stream: int = 0
    heard_s: float = 0.0
    hint: str = ""
    outbox: WatchOutbox = field(default_factory=lambda: WatchOutbox(pb.ReceiverHello()))
    told: Observations = field(default_factory=Observations)
    traffic: Traffic | None = None
    """Requests of a frontend for the real judge. None: its batches are empty."""
    now_s: float = 0.0
    refuses: bool = False
    """True if the process refuses every weight of a canary."""

    def refusal(self, content: Content) -> str:
        """Return the reason to refuse `content`; empty: none."""
        return "the tokenizer is missing" if self.refuses and content.canary_percent else ""

    @property
    def is_observed(self) -> bool:
        """True while a rollout runs."""
        in_force = self.fence.in_force
        return in_force is not None and bool(in_force.content.running_rollout)

    def report(self) -> pb.ReceiverReport:
        """Return the state of the process."""
        return pb.ReceiverReport(
            can_place=self.role == "router",
            queue_delay_us=1000,
            prefill_load_share=0.1,
            uncached_prefill_s_per_s=0.1,
        )

    def shadows(self) -> tuple[shadow_pb2.ShadowReport, ...]:
        """Return the changed counts of shadow traffic: none."""
        return ()

    def observations(self) -> pb.ObservationBatch | None:
        """Return the next batch of a frontend."""
        if self.role != "frontend":
            return None
        self.told.take_rollout(self.fence.in_force.content.running_rollout if self.fence.in_force else "")
        drained = self.told.drain(self.now_s)
        if drained is None:
            return None
        batch = pb.ObservationBatch.FromString(drained.SerializeToString())
        if self.traffic is not None and self.fence.in_force is not None:
            self.traffic.fill(batch, self.fence.in_force.content)
        return batch
