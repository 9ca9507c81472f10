"""Replicas and control processes of the simulated lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.pools.registry import Registry
from controlplane.rollouts.golden import GoldenSet, Prompt
from controlplane.snapshots.receivers import Receiver, Receivers
from controlplane.warming import Warming
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import WarmUpSettings
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import LIFE, Member
from kvmesh.replica.life import ReplicaLife

VERSION = "v1"
DIGEST = "engine-build"
KEY = ReferenceKey(VERSION, DIGEST)
BLOCK = 4
ROUTER = "router-0"
PROMPTS = tuple(Prompt(tuple(range(at, at + 4)), 3) for at in range(6))
OUTPUTS = tuple((at + 50, at + 51, at + 52) for at in range(6))
SETTINGS = WarmUpSettings(
    warming_max_s=10.0, seeding_max_s=3.0, background_max_s=8.0, probing_max_s=4.0, package_every_s=20.0
)


@dataclass
class Replica:
    """A replica process and its engine. Its state is that of the real life."""

    name: str
    role: str
    pool: str
    reports_cold_steps: bool
    life: ReplicaLife | None = None
    """None: the process is down."""
    boots: int = 0
    engines: int = 0
    queue_s: float = 0.0
    """Longest wait of its users."""
    engine: str = ""
    """Boot id of the engine. Empty: it is down."""
    is_bad: bool = False
    """True if the engine gives wrong tokens."""
    passes: int = 0
    """Passes that the engine ran."""
    leader: Control | None = None
    """The control process to which its stream is up."""
    stream: int = 0
    """Number of its stream. Messages of an earlier one are lost."""
    heard_s: float = float("-inf")
    """Time of the last message of the leader, at this boot."""
    lease: Member | None = None
    """The lease in Redis. It outlives the process by some seconds."""
    contact_s: float = 0.0
    """Time since which one leader could drive the life without a break."""

    @property
    def boot_id(self) -> str:
        """Boot id of the process."""
        return f"{self.name}/{self.boots}"

    def member(self) -> Member:
        """Return the lease as the process writes it."""
        assert self.life is not None
        state = self.life.state.value
        return Member(
            process_id=self.name,
            role="prefill" if self.role == "prefill" else "decode",
            address=f"{self.name}:1",
            boot_id=self.boot_id,
            model_version=VERSION,
            block_tokens=BLOCK,
            engine_boot_id=self.life.engine_boot_id,
            draining=state != "serving",
            capabilities=(LIFE,),
            pool=self.pool,
            state=state,
            digests={"engine": DIGEST},
        )


@dataclass
class Control:
    """A control process with the real warm-up."""

    name: str
    make: Callable[[], Warming]
    boots: int = 0
    is_up: bool = True
    is_paused: bool = False
    leads: bool = False
    warming: Warming = field(init=False)
    registry: Registry = field(init=False)
    receivers: Receivers = field(init=False)
    jobs: dict[int, object] = field(default_factory=dict)
    """Jobs under way."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Events that wait for the end of a pause."""

    def __post_init__(self) -> None:
        self.boot()

    @property
    def boot_id(self) -> str:
        """Name and number of the boot."""
        return f"{self.name}/{self.boots}"

    def boot(self) -> None:
        """Begin another boot: all memory is lost."""
        self.boots += 1
        self.warming, self.registry, self.receivers = self.make(), Registry(), Receivers()
        self.jobs, self.waiting = {}, []
        self.is_up, self.is_paused, self.leads = True, False, False

    def hear_routers(self, delays: dict[str, float], unplaced: set[str], now_s: float) -> None:
        """Take the report of the router of each pool. `unplaced`: pools where it has users and can place none."""
        for pool, delay_s in delays.items():
            name = router_name(pool)
            known = self.receivers.get(name, "1")
            if known is None:
                known = Receiver(name, "1", "router", pool)
                self.receivers.hello(known, now_s)
            known.is_connected = True
            known.report = pb.ReceiverReport(
                queue_delay_us=round(delay_s * 1e6),
                live_request_count=1,
                can_place=pool not in unplaced,
            )

    def hear_queue(self, replica: Replica, now_s: float) -> None:
        """Take the longest wait at a replica."""
        known = self.receivers.get(replica.name, replica.boot_id)
        if known is None:
            known = Receiver(replica.name, replica.boot_id, replica.role, replica.pool)
            self.receivers.hello(known, now_s)
        known.is_connected = True
        known.report = pb.ReceiverReport(longest_wait_us=round(replica.queue_s * 1e6))


def router_name(pool: str) -> str:
    """Return the name of the router of a pool."""
    return f"{ROUTER}-{pool}"


def router(pool: str) -> Member:
    """Return the lease of the router of a pool."""
    return Member(
        process_id=router_name(pool),
        role="router",
        address="router:1",
        boot_id="1",
        model_version=VERSION,
        block_tokens=BLOCK,
        pool=pool,
    )


def new_warming(wall: Callable[[], float], *, has_set: bool) -> Warming:
    """Return the warm-up of one control process. `has_set`: the version has a golden set of its own."""
    sets = {VERSION: GoldenSet(PROMPTS, OUTPUTS)} if has_set else {}
    bounds = ModelBounds(512, 1000, {"prefill": 64, "decode": 64})
    return Warming(SETTINGS, References(PROMPTS, sets), lambda _: bounds, wall)
