"""The dispatches of peer routers as known here, with the detection and repair of missed messages (anti-entropy). Pure.

Messages may be lost, while Redis is unavailable or a reader stands still. Each router sends a digest of its open dispatches
twice a second. A receiver forgets dispatches that are not in the digest, and sends a repair request for unknown ones. A
silent router counts as having no dispatches. If it is alive, its next digest restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from services.router.gossip.messages import Digest, Entry, RepairRequest
from services.router.placement.backlog import Backlog
from services.router.placement.policy import Dispatched, Event, Finished, Measured, RouterLost, Started

DIGEST_INTERVAL_S: Final = 0.5
"""Period of a router's digests."""

SILENT_S: Final = 3 * DIGEST_INTERVAL_S
"""Failure detector: a router without a message for this long counts as lost."""

REPAIR_RETRY_S: Final = 0.25
"""An unanswered repair request is repeated after this."""

SYNC_TIMEOUT_S: Final = 0.5
"""A new router waits at most this long for the open dispatches of each peer router before it takes requests."""

REPAIR_IDS_MAX: Final = 256
"""A router that misses more dispatches than this sends a repair request for all of them."""

ALL_IDS: Final = ""


class KnownDispatch(Protocol):
    """A dispatch of a peer router that is counted here."""

    @property
    def replica(self) -> str:
        """Replica of the dispatch."""

    @property
    def is_started(self) -> bool:
        """True if its engine has the prompt."""


@dataclass(slots=True)
class _Router:
    """The process of a peer router."""

    name: str
    boot_id: str
    since_s: float
    last_entry_s: float
    seq: int = 0
    is_silent: bool = False
    has_synced: bool = False
    """True once all its open dispatches were applied here."""
    needs_all: bool = True
    missing_ids: set[str] = field(default_factory=set)
    repair_requested_s: float = float("-inf")


class PeerRouters:
    """Reads the entries of peer routers and passes their events to the policy, by `observe`.

    `known` returns the counted dispatches of a router by request id, and may change with each observed event. It is the
    only record of them, so the next digest restores a dispatch that was forgotten for any reason. Dispatches to
    replicas that `has_replica` denies are skipped until the replica is known.
    """

    def __init__(
        self,
        router: str,
        boot_id: str,
        observe: Callable[[Event], None],
        known: Callable[[str], Mapping[str, KnownDispatch]],
        has_replica: Callable[[str], bool],
    ) -> None:
        self.gap_total = 0
        """Entries of peer routers that were missed."""
        self.repaired_total = 0
        """Dispatches, starts and finishes of peer routers that a digest revealed."""
        self.requested_ids: set[str] = set()
        """Own dispatches that peer routers ask for; ALL_IDS stands for all of them. The caller answers and clears the set.
        """
        self._router = router
        self._boot_id = boot_id
        self._observe = observe
        self._known = known
        self._has_replica = has_replica
        self._routers: dict[str, _Router] = {}

    def __len__(self) -> int:
        return len(self._routers)

    def set_routers(self, boot_ids: Mapping[str, str], now_s: float) -> None:
        """Set the other live routers. The dispatches of a lost router are forgotten."""
        for name, one in list(self._routers.items()):
            if boot_ids.get(name) != one.boot_id:
                del self._routers[name]
                self._observe(RouterLost(name))
        for name, boot_id in boot_ids.items():
            if name not in self._routers:
                self._routers[name] = _Router(name, boot_id, now_s, now_s)

    def applying(self, entry: Entry, now_s: float) -> Generator[None, None, None]:
        """Apply an entry message by message. Other events may be observed between two messages."""
        if entry.router == self._router:
            return
        for message in entry.messages:
            if isinstance(message, RepairRequest) and (message.router, message.boot_id) == (
                self._router,
                self._boot_id,
            ):
                # Answered for any sender, because a router that starts is not known here yet.
                self.requested_ids.update(message.request_ids or (ALL_IDS,))
        one = self._routers.get(entry.router)
        if one is None or one.boot_id != entry.boot_id or entry.seq <= one.seq:
            return
        if one.seq:
            self.gap_total += entry.seq - one.seq - 1
        one.seq = entry.seq
        one.last_entry_s = now_s
        one.is_silent = False
        for message in entry.messages:
            if self._routers.get(one.name) is not one:
                return  # the rest is of a router that is lost
            match message:
                case Dispatched():
                    if self._has_replica(message.replica) and not self._is_duplicate(one, message):
                        one.missing_ids.discard(message.request_id)
                        self._observe(message)
                case Started() | Finished():
                    self._observe(message)
                case Measured():
                    if one.needs_all and self._has_replica(message.replica):
                        self._observe(message)  # later measurements came with the finishes
                case Digest():
                    self._apply_digest(one, message, now_s)
            yield

    def _is_duplicate(self, one: _Router, message: Dispatched) -> bool:
        """Return True if the dispatch is known here: it was sent again because another router had asked for it."""
        here = self._known(one.name).get(message.request_id)
        return (
            here is not None and here.replica == message.replica and message.request_id not in one.missing_ids
        )

    def _apply_digest(self, one: _Router, digest: Digest, now_s: float) -> None:
        if one.needs_all and not digest.is_full:
            return  # the answer is on its way, or will be requested again
        known = self._known(one.name)
        listed: set[str] = set()
        missing_ids: set[str] = set()
        has_all = True
        for replica, prompts in digest.open.items():
            if not self._has_replica(replica):
                has_all = False
                continue
            listed.update(prompts)
            for request_id, started_s in prompts.items():
                here = known.get(request_id)
                if here is None or here.replica != replica or (here.is_started and started_s is None):
                    missing_ids.add(request_id)
                elif started_s is not None and not here.is_started:
                    self.repaired_total += 1
                    self._observe(Started(one.name, request_id, started_s))
        for request_id in [each for each in known if each not in listed]:
            self.repaired_total += 1
            self._observe(Finished(one.name, request_id, now_s))
        self.repaired_total += len(missing_ids - one.missing_ids)
        one.missing_ids = missing_ids
        one.needs_all = False
        one.has_synced = one.has_synced or (digest.is_full and has_all and not missing_ids)

    def detect_failures(self, now_s: float) -> None:
        """Forget the dispatches of routers that are silent."""
        for one in self._routers.values():
            if not one.is_silent and now_s - one.last_entry_s > SILENT_S:
                one.is_silent = True
                self._observe(RouterLost(one.name))

    def has_repair_requests(self, now_s: float) -> bool:
        """Return True if `repair_requests` would return some."""
        return any(_needs_repair(one, now_s) for one in self._routers.values())

    def repair_requests(self, now_s: float) -> list[RepairRequest]:
        """Return the repair requests to send now."""
        repair_requests = []
        for one in self._routers.values():
            if _needs_repair(one, now_s):
                one.repair_requested_s = now_s
                is_all = one.needs_all or len(one.missing_ids) > REPAIR_IDS_MAX
                repair_requests.append(
                    RepairRequest(one.name, one.boot_id, () if is_all else tuple(sorted(one.missing_ids)))
                )
        return repair_requests

    def is_caught_up(self, now_s: float) -> bool:
        """Return True if every peer router has sent its dispatches to the replicas known here, or had the time to do so."""
        return all(one.has_synced or now_s - one.since_s > SYNC_TIMEOUT_S for one in self._routers.values())

    @property
    def silent_count(self) -> int:
        """Routers that hold a lease and are silent."""
        return sum(one.is_silent for one in self._routers.values())


def _needs_repair(one: _Router, now_s: float) -> bool:
    return (
        (one.needs_all or bool(one.missing_ids))
        and not one.is_silent
        and now_s - one.repair_requested_s >= REPAIR_RETRY_S
    )


def known_dispatches(backlog: Backlog) -> Callable[[str], Mapping[str, KnownDispatch]]:
    """Return the `known` of PeerRouters that reads `backlog`."""
    return backlog.by
