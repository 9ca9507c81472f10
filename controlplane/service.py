"""ControlPlaneService: translates requests of operators into commands of the core, and its state into answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Final

from controlplane import views
from controlplane.command_queue import Author
from controlplane.command_runs import CommandRuns, Context
from controlplane.core import ControlCore
from controlplane.loop import ControlLoop
from controlplane.operators import STABLE, Operators, Prepared, unknown_name, unknown_rollout
from controlplane.rollouts import document as documents
from controlplane.rollouts.document import RolloutDocument
from controlplane.snapshots.desired import Desired
from controlplane.store.snapshot_history import PastSnapshot
from kvmesh.clock import Clock
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc
from kvmesh.errors import Violation, invalid

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "kvmesh.control.v1.ControlPlaneService"

PAGE: Final = 20
PAGE_MAX: Final = 100

HISTORY: Final = 50
"""Snapshots among which a revert looks for its target."""

FOLLOW_S: Final = 1.0
"""Longest time between two states of a followed rollout."""

POLL_S: Final = 0.1
"""Interval in which a followed rollout is compared with its last state."""


class ControlPlaneServicer(control_pb2_grpc.ControlPlaneServiceServicer):
    """See control.proto. A follower redirects commands, and reads that only the leader can answer."""

    def __init__(
        self,
        loop: ControlLoop,
        operators: Operators,
        process_id: str,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._core: ControlCore = loop.core
        self._process_id = process_id
        self._clock = clock
        self._wall = wall
        self._operators = operators
        self._runs = CommandRuns(loop, clock)

    # Reads.

    async def GetControlPlane(
        self, request: pb.GetControlPlaneRequest, context: Context
    ) -> pb.GetControlPlaneResponse:
        address = self._loop.hint().leader_address
        state = views.control_plane(self._core, self._process_id, address, self._wall())
        return pb.GetControlPlaneResponse(control_plane=state)

    async def GetRollout(self, request: pb.GetRolloutRequest, context: Context) -> pb.GetRolloutResponse:
        return pb.GetRolloutResponse(rollout=documents.to_message(self._rollout(request.rollout)))

    async def ListRollouts(
        self, request: pb.ListRolloutsRequest, context: Context
    ) -> pb.ListRolloutsResponse:
        count = _page(request.page_size)
        latest = list(reversed(self._core.library.rollouts))[:count]
        return pb.ListRolloutsResponse(rollouts=[documents.to_message(each) for each in latest])

    async def WatchRollout(
        self, request: pb.WatchRolloutRequest, context: Context
    ) -> AsyncIterator[pb.WatchRolloutResponse]:
        self._check_leads()
        name = self._rollout(request.rollout).id
        sent, sent_s = -1, float("-inf")
        while True:
            self._check_leads()
            document = self._rollout(name)
            now_s = self._clock.now_s()
            if document.revision != sent or now_s - sent_s >= FOLLOW_S:
                sent, sent_s = document.revision, now_s
                yield pb.WatchRolloutResponse(rollout=documents.to_message(document))
                if document.is_final:
                    return
            await asyncio.sleep(POLL_S)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.GetSnapshotResponse:
        latest = self._core.publisher.latest
        last = self._core.publisher.history[-1] if self._core.publisher.history else None
        is_own = last is not None and last.snapshot == latest
        view = views.snapshot(
            latest,
            self._core.content,
            reason=last.reason if last is not None and is_own else "",
            by=last.by if last is not None and is_own else "",
        )
        return pb.GetSnapshotResponse(snapshot=view)

    async def ListSnapshots(
        self, request: pb.ListSnapshotsRequest, context: Context
    ) -> pb.ListSnapshotsResponse:
        found = await self._history(_page(request.page_size))
        return pb.ListSnapshotsResponse(snapshots=[views.past(each) for each in found])

    async def ListReceivers(
        self, request: pb.ListReceiversRequest, context: Context
    ) -> pb.ListReceiversResponse:
        self._check_leads()
        return pb.ListReceiversResponse(receivers=views.receivers(self._core, self._clock.now_s()))

    # Commands.

    async def CordonReplica(
        self, request: pb.CordonReplicaRequest, context: Context
    ) -> pb.CordonReplicaResponse:
        self._check_leads()
        prepared = self._operators.cordon(request, self._author(context))
        await self._run(prepared, context, is_trial=request.validate_only)
        assert isinstance(prepared.made, Desired)
        cordon = prepared.made.content_cordons()[-1]
        response = pb.CordonReplicaResponse(overridden=prepared.overridden)
        response.cordon.process_id, response.cordon.boot_id = cordon.process_id, cordon.boot_id
        response.cordon.draining, response.cordon.reason = cordon.is_draining, cordon.reason
        return response

    async def UncordonReplica(
        self, request: pb.UncordonReplicaRequest, context: Context
    ) -> pb.UncordonReplicaResponse:
        self._check_leads()
        prepared = self._operators.uncordon(request)
        was_cordoned = self._operators.is_cordoned(request.process_id)
        if was_cordoned:
            await self._run(prepared, context, is_trial=request.validate_only)
        return pb.UncordonReplicaResponse(was_cordoned=was_cordoned)

    async def StartRollout(
        self, request: pb.StartRolloutRequest, context: Context
    ) -> pb.StartRolloutResponse:
        self._check_leads()
        prepared = self._operators.start(request, self._author(context), self._new_id())
        await self._run(prepared, context, is_trial=request.validate_only)
        return pb.StartRolloutResponse(rollout=self._told(prepared), overridden=prepared.overridden)

    async def ChangeRollout(
        self, request: pb.ChangeRolloutRequest, context: Context
    ) -> pb.ChangeRolloutResponse:
        self._check_leads()
        prepared = self._operators.change(request, self._author(context))
        await self._run(prepared, context, is_trial=request.validate_only)
        return pb.ChangeRolloutResponse(rollout=self._told(prepared), overridden=prepared.overridden)

    async def RevertSnapshot(
        self, request: pb.RevertSnapshotRequest, context: Context
    ) -> pb.RevertSnapshotResponse:
        self._check_leads()
        past = None if request.to == STABLE else await self._past(request.to)
        prepared = self._operators.revert(request, self._author(context), past)
        await self._run(prepared, context, is_trial=request.validate_only)
        view = views.snapshot(self._core.publisher.latest, self._core.content, overridden=prepared.overridden)
        return pb.RevertSnapshotResponse(snapshot=view)

    async def Freeze(self, request: pb.FreezeRequest, context: Context) -> pb.FreezeResponse:
        prepared = self._operators.freeze(request)
        await self._run(prepared, context, is_trial=request.validate_only)
        assert isinstance(prepared.made, Desired)
        until_s = prepared.made.frozen_until_s
        return pb.FreezeResponse(frozen_until=documents.timestamp(until_s) if until_s else None)

    async def _run(self, prepared: Prepared, context: Context, *, is_trial: bool) -> None:
        await self._runs.run(prepared, context, is_trial=is_trial)

    def _check_leads(self) -> None:
        self._runs.check_leads()

    def _author(self, context: Context) -> Author:
        return self._runs.author(context)

    def _rollout(self, name: str) -> RolloutDocument:
        document = self._core.library.rollout(name)
        if document is None:
            raise unknown_rollout(name)
        return document

    def _told(self, prepared: Prepared) -> pb.Rollout:
        """Return the rollout as it is now, else as the command made it."""
        made = prepared.made
        assert isinstance(made, RolloutDocument)
        known = self._core.library.rollout(made.id)
        is_newer = known is not None and known.revision >= made.revision
        return documents.to_message(known if known is not None and is_newer else made)

    def _new_id(self) -> str:
        start_s = self._core.library.start_s(self._wall())
        first = f"r-{datetime.fromtimestamp(start_s, UTC):%Y%m%d-%H%M%S}"
        name, number = first, 2
        while self._core.library.rollout(name) is not None:
            name, number = f"{first}-{number}", number + 1
        return name

    async def _history(self, count: int) -> list[PastSnapshot]:
        """Return the last snapshots: of Redis, or of this process without Redis."""
        found = await self._loop.store.history(count)
        if found is not None:
            return found
        own = reversed(self._core.publisher.history)
        return [PastSnapshot(each.snapshot, each.reason, each.by) for each in own][:count]

    async def _past(self, name: str) -> Any:
        history = await self._history(HISTORY)
        found = next((each.snapshot for each in history if str(each.snapshot.name) == name), None)
        if found is None:
            raise unknown_name("to", name, f'"{STABLE}" or a name of `kvmesh snapshot history` is allowed')
        return found


def _page(size: int) -> int:
    if size > PAGE_MAX:
        raise invalid("FIELD_OUT_OF_RANGE", [Violation("page_size", str(size), f"0 to {PAGE_MAX}")])
    return size or PAGE
