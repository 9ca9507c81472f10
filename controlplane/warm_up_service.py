"""WarmUpService: the lives of replicas, packages and registered prefixes for operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
from msgspec.structs import replace as changed

from controlplane import warm_up_views as views
from controlplane.actions import AppendEvent
from controlplane.command_runs import RETRY_AFTER_S, UNVERIFIED
from controlplane.core import NO_REDIS, NOT_LEADER
from controlplane.loop import ControlLoop
from controlplane.operators import REASON_MAX, unknown_name
from controlplane.warmup.prefixes import PrefixError, RegisteredPrefix, check
from kvmesh.attach.frames import TOKEN_BYTES, unpack_ids
from kvmesh.call import GrpcCall
from kvmesh.clock import Clock
from kvmesh.control.v1 import warm_up_pb2 as pb
from kvmesh.control.v1 import warm_up_pb2_grpc
from kvmesh.errors import MeshError, Violation, invalid

SERVICE_NAME: Final = "kvmesh.control.v1.WarmUpService"

Context = grpc.aio.ServicerContext[Any, Any]


class WarmUpServicer(warm_up_pb2_grpc.WarmUpServiceServicer):
    """See warm_up.proto. A follower names the leader."""

    def __init__(self, loop: ControlLoop, clock: Clock, wall: Callable[[], float]) -> None:
        self._loop = loop
        self._core = loop.core
        self._warming = loop.core.warming
        self._clock = clock
        self._wall = wall

    async def ListLives(self, request: pb.ListLivesRequest, context: Context) -> pb.ListLivesResponse:
        self._check_leads()
        lives, now_s = self._warming.lives, self._clock.now_s()
        return pb.ListLivesResponse(
            lives=[views.life(each, lives.boots.count(each.name), now_s) for each in lives.fleet.ordered()],
            drives_lives=self._warming.settings.drives_lives,
        )

    async def ListProfiles(
        self, request: pb.ListProfilesRequest, context: Context
    ) -> pb.ListProfilesResponse:
        packages = self._warming.packages
        return pb.ListProfilesResponse(
            profiles=[views.profile(each) for each in packages.ordered()], problems=packages.problems
        )

    async def QuarantineProfile(
        self, request: pb.QuarantineProfileRequest, context: Context
    ) -> pb.QuarantineProfileResponse:
        self._check_leads()
        package = self._warming.packages.named(request.name)
        if package is None:
            allowed = "no package has that name; `kvmesh profile list` lists the packages"
            raise unknown_name("name", request.name, allowed)
        if len(request.reason) > REASON_MAX:
            value, allowed = f"{len(request.reason)} characters", f"up to {REASON_MAX} characters"
            raise invalid("FIELD_OUT_OF_RANGE", [Violation("reason", value, allowed)])
        if not request.validate_only:
            self._check_redis()
            author = self._author(context)
            reason = "" if request.lift else request.reason or f"by {author[0]}"
            package = self._warming.quarantine(request.name, reason) or package
            what = "profile.lift" if request.lift else "profile.quarantine"
            self._audit(what, request.name, author, request.reason)
        return pb.QuarantineProfileResponse(profile=views.profile(package))

    async def AddPrefix(self, request: pb.AddPrefixRequest, context: Context) -> pb.AddPrefixResponse:
        self._check_leads()
        if len(request.token_ids) % TOKEN_BYTES:
            value = f"{len(request.token_ids)} bytes"
            raise invalid("FIELD_OUT_OF_RANGE", [Violation("token_ids", value, "a multiple of 4 bytes")])
        author = self._author(context)
        prefix = RegisteredPrefix(
            name=request.name,
            model_version=request.model_version,
            token_ids=unpack_ids(request.token_ids),
            by=author[0],
            at_s=self._wall(),
        )
        try:
            check(prefix, self._core.versions().values())
            if not request.validate_only:
                self._check_redis()
                prefix = self._warming.register(prefix)
                self._audit("prefix.add", prefix.name, author, f"{len(prefix.token_ids)} tokens")
        except PrefixError as error:
            violation = Violation(error.field, error.value, error.allowed, is_clause=True)
            raise invalid("FIELD_OUT_OF_RANGE", [violation]) from None
        return pb.AddPrefixResponse(prefix=views.prefix(prefix))

    async def ListPrefixes(
        self, request: pb.ListPrefixesRequest, context: Context
    ) -> pb.ListPrefixesResponse:
        return pb.ListPrefixesResponse(
            prefixes=[views.prefix(each) for each in self._warming.prefixes.ordered()]
        )

    async def DeletePrefix(
        self, request: pb.DeletePrefixRequest, context: Context
    ) -> pb.DeletePrefixResponse:
        self._check_leads()
        known = self._warming.prefixes.get(request.name)
        if known is not None and not request.validate_only:
            self._check_redis()
            self._warming.register(changed(known, token_ids=(), at_s=self._wall()))
            self._audit("prefix.delete", request.name, self._author(context), "")
        return pb.DeletePrefixResponse(was_there=known is not None)

    # Parts.

    def _check_leads(self) -> None:
        if not self._core.leads:
            address = self._loop.hint().leader_address
            where = f"the leader is at {address}" if address else "no leader is known now; try again"
            raise MeshError(
                "NOT_LEADER", f"{NOT_LEADER}; {where}", {"leader_address": address} if address else {}
            )

    def _check_redis(self) -> None:
        if not self._core.has_redis:
            raise MeshError("STORE_UNAVAILABLE", NO_REDIS, retry_after_s=RETRY_AFTER_S)

    def _author(self, context: Context) -> tuple[str, str]:
        call = GrpcCall(context)
        return ", ".join(call.identities) or UNVERIFIED, call.peer

    def _audit(self, what: str, target: str, author: tuple[str, str], reason: str) -> None:
        details = {"reason": reason} if reason else {}
        self._loop.store.append(AppendEvent(what, target, "done", *author, details))
        self._loop.touch()
