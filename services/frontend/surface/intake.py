"""Admission control: from a client's bytes to a complete request spec: pool, tokens, deadlines, the execution's number.

A shell: Redis numbers a request that may have run before. Raises MeshError for a refused request.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from kvmesh.call import Call
from kvmesh.clock import Clock, wall_s
from kvmesh.deadlines import from_remaining_s
from kvmesh.errors import Violation, invalid
from kvmesh.pools import DEFAULT_POOL
from kvmesh.regions.names import HOME_METADATA, split
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.executions import (
    ANY_POOL,
    Claim,
    Execution,
    Executions,
    PoolClaimed,
    key_reused,
)
from services.frontend.requests import faults, feasibility
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.feasibility import Outlook
from services.frontend.requests.pool_choice import ChosenPool
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import ExecutionSpec, RequestSpec, Timing
from services.frontend.requests.resume_token import ATTEMPT_STRIDE, EPOCH_MAX, ResumeToken, Seal
from services.frontend.requests.takeover import AttemptLocation
from services.frontend.surface import validation
from services.frontend.surface.request_parser import Message, Parsed, RequestParser
from services.frontend.surface.served_versions import ServedVersions
from services.frontend.surface.validation import ValidRequest

HANDOVER_METADATA: Final = "kvmesh-hand-over"
"""Metadata key of a client that can continue at another frontend."""

CONTINUES_METADATA: Final = "kvmesh-continues"
"""Metadata key of a call that repeats a request by its idempotency key, and has the beginning of its output already.

The output must be the same again, or the call is refused (RESUME_NOT_EXACT).
"""

CLAIMS_MAX: Final = 3
"""Tries to agree with other frontends on the pool of an idempotency key. Then this frontend's choice counts."""


async def _at_once() -> object:
    return None


@dataclass(frozen=True, slots=True)
class Arrival:
    """The known facts of a call beside its message."""

    caller: Caller
    at_s: float
    remaining_s: float | None
    """Seconds until the client's deadline; None: it set none."""
    owner: str
    """Name of the execution."""
    can_move: bool
    traceparent: str
    continues: bool = False
    """True: the client has the beginning of the output, from an earlier execution."""
    home: str = ""
    """Home region of the caller. Empty: a mesh without regions."""
    moves: int = 0
    """Moves of the executions before this one, which ended unanswered and are read again."""
    left_regions: frozenset[str] = frozenset()
    """Regions that those executions left. Empty name: the own one."""


class Intake:
    """See the module. `seal` signs resume tokens.

    `started()` returns once the frontend knows the snapshot and the secret of its mesh.

    `random_bits(n)` returns n random bits for request ids and seeds. Clients see their own, and must not be able to guess
    those of others.
    """

    def __init__(
        self,
        core: FrontendCore,
        versions: ServedVersions,
        parser: RequestParser,
        executions: Executions,
        seal: Seal,
        clock: Clock,
        *,
        start_min_s: float = 0.0,
        started: Callable[[], Awaitable[object]] = _at_once,
        random_bits: Callable[[int], int] = secrets.randbits,
        is_seeded: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`is_seeded(pool)`: True if tokens of the pool do not depend on the engine that makes them."""
        self._is_seeded = is_seeded
        self._core = core
        self._versions = versions
        self._parser = parser
        self._executions = executions
        self._seal = seal
        self._clock = clock
        self._start_min_s = start_min_s
        self._started = started
        self._random_bits = random_bits

    @property
    def reads_once(self) -> bool:
        """True if no request is ever read again: all versions make the same token ids of each prompt."""
        return self._versions.has_one_tokenizer

    def arrival(
        self, call: Call[Any, Any], caller: Caller, at_s: float, remaining_s: float | None, traceparent: str
    ) -> Arrival:
        """Return the arrival of `call`, which came at `at_s` with `remaining_s` left.

        The execution has a name from now on, until `forget`.
        """
        owner, can_move = self._executions.new_owner(), HANDOVER_METADATA in call.metadata
        home = self._core.regions.home_of(call.metadata.get(HOME_METADATA, ""))
        continues = CONTINUES_METADATA in call.metadata
        return Arrival(caller, at_s, remaining_s, owner, can_move, traceparent, continues, home)

    def forget(self, owner: str) -> None:
        """Forget the execution `owner`, which is over or never began. Idempotent; an empty name is ignored."""
        self._executions.forget(owner)

    def again(self, arrival: Arrival, before: LiveRequest) -> Arrival:
        """Return `arrival` for another execution of the same call; `before` is forgotten, but not where it was."""
        self.forget(arrival.owner)
        return replace(
            arrival,
            owner=self._executions.new_owner(),
            moves=before.moves,
            left_regions=frozenset(before.refused_regions),
        )

    async def read(self, data: bytes, arrival: Arrival) -> RequestSpec:
        """Return the client's request as a complete spec. Raises MeshError before any router hears of the request."""
        await self._started()
        message = await self._parser.read(data)
        request_id = self._request_id(message, arrival.caller.tenant.name)
        chosen, replaced = self._choose(message, request_id, arrival), ""
        for left in range(CLAIMS_MAX, 0, -1):
            if arrival.continues and not self._is_seeded(chosen.pool):
                raise faults.not_exact(
                    "an engine of its pool gives other tokens than another one (seeded_resume)"
                )
            version = self._versions.get(chosen.model_version)
            parsed = await self._parser.check(message, version, arrival.caller.service_class)
            try:
                return await self._spec(
                    parsed, arrival, request_id, chosen, replaced if left > 1 else ANY_POOL
                )
            except PoolClaimed as claimed:
                chosen, replaced = self._claimed(claimed.pool, chosen, request_id, message, arrival)
                if replaced and arrival.continues:
                    raise faults.not_exact(
                        f"pool {replaced} of its earlier execution cannot serve it"
                    ) from None
        raise AssertionError("the last claim takes any pool")

    def _choose(self, message: Message, request_id: str, arrival: Arrival) -> ChosenPool:
        """Return the pool of the request: that of its resume token, else by region, weight and availability.

        Raises MeshError (STALE_SNAPSHOT) if no pool serves the version of the token any more.
        """
        token, session = message.resume, message.request.session_id
        if token is not None:
            found = self._resumed(token, session or request_id, arrival)
            if found is None or token.model_version not in self._versions:
                received = len(message.request.options.resume.received_token_ids)
                raise faults.given_up(faults.STALE_SNAPSHOT, 0, received)
            return found
        model = message.request.model
        if model and model not in self._versions.models:
            names = ", ".join(sorted(self._versions.models))
            raise invalid(
                "FIELD_OUT_OF_RANGE", [Violation("model", repr(model[:128]), f"empty or one of {names}")]
            )
        return self._core.regions.choose(
            arrival.caller.tenant,
            session or request_id,
            arrival.home,
            self._clock.now_s(),
            is_session=bool(session),
            without=arrival.left_regions,
            model=model,
        )

    def _resumed(self, token: ResumeToken, session: str, arrival: Arrival) -> ChosenPool | None:
        """Return the pool that continues the request of `token`: where its attempt runs, else in the own region first."""
        pools, regions, tenant = self._core.pools, self._core.regions, arrival.caller.tenant
        region = token.location.region if token.location is not None else ""
        if region not in ("", regions.settings.own):
            pool = token.pool or DEFAULT_POOL  # a token does not name that pool
            there = regions.resumed(region, pool, token.model_version, tenant, arrival.home)
            if there is not None:
                return there
        found = pools.of_version(token.model_version, tenant.name, token.pool)
        if found is None:
            found = regions.of_version(token.model_version, tenant, arrival.home, session)
        return found

    def _claimed(
        self, pool: str, chosen: ChosenPool, request_id: str, message: Message, arrival: Arrival
    ) -> tuple[ChosenPool, str]:
        """Return the pool of a request with an idempotency key that an execution in `pool` has claimed.

        `chosen` replaces a claimed pool that cannot place, or whose region may not serve the request any more. The claimed
        pool's name is then returned, else an empty text. Raises MeshError if the claim is for another model.
        """
        pools, region = self._core.pools, split(pool)[0]
        found = pools.named(pool)
        if found is None or found.model_version not in self._versions or region in arrival.left_regions:
            return chosen, pool
        if not pools.models.share(found.model_version, chosen.model_version):
            raise key_reused()
        if region and not self._core.regions.may_send(region, arrival.caller.tenant, arrival.home):
            return chosen, pool
        if pools.cannot_place(*found[:2]) and pools.can_place(*chosen[:2]):
            return chosen, pool
        session = message.request.session_id or request_id
        assigned = pools.assigned(arrival.caller.tenant.name, session, message.request.model)
        return (assigned if assigned.pool == pool else found._replace(rollout="")), ""

    async def _spec(
        self, parsed: Parsed, arrival: Arrival, request_id: str, chosen: ChosenPool, replaced: str
    ) -> RequestSpec:
        """Return the complete request spec. Raises MeshError and PoolClaimed."""
        asked, prompt_ids, bounds, version = parsed
        asked_tokens = validation.fit(asked, parsed.prompt_tokens, bounds)
        tenant = arrival.caller.tenant
        digest = validation.digest(asked, prompt_ids, asked_tokens, tenant.name)
        validation.check_resumed(asked, digest)
        resume, timing = asked.resume, _timing(asked, arrival)
        self._check_features(asked, chosen)
        self._check_time(asked, arrival, timing, parsed.prompt_tokens, chosen)
        max_output_tokens = asked_tokens
        if resume is not None and resume.max_output_tokens:
            # The same limit as the running attempt, which is taken over.
            max_output_tokens = min(asked_tokens, resume.max_output_tokens)
        elif timing.is_clients_deadline and tenant.name and tenant.may_clamp:
            outlook = self._core.outlook(
                asked.session_id or request_id,
                arrival.caller.service_class.priority_class,
                parsed.prompt_tokens,
                self._clock.now_s(),
                chosen,
            )
            max_output_tokens = self._clamped(asked, asked_tokens, timing.deadline_s, outlook)
        execution = await self._begin(asked, request_id, digest, arrival, chosen, replaced)
        return RequestSpec(
            caller=arrival.caller,
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=replace(asked.sampling.resolved, seed=execution.seed),
            stop=asked.sampling.stop,
            max_output_tokens=max_output_tokens,
            asked_output_tokens=asked_tokens,
            pool=chosen.pool,
            home=arrival.home,
            border=self._core.regions.border,
            model_version=bounds.model_version,
            rollout="" if chosen.is_diverted or resume is not None else chosen.rollout,
            end_token_ids=frozenset(() if asked.sampling.ignores_eos else version.tokenizer.end_token_ids),
            stop_token_ids=frozenset(asked.sampling.stop_token_ids),
            priority=asked.priority,
            session_id=asked.session_id,
            timing=timing,
            execution=ExecutionSpec(
                attempt_base=execution.epoch * ATTEMPT_STRIDE,
                is_resumed=resume is not None,
                is_fenced=execution.is_fenced,
                is_keyed=bool(asked.idempotency_key),
                owner=arrival.owner,
                earlier=execution.earlier,
                can_move=arrival.can_move,
                location=self._location(resume, chosen) if execution.is_shown else None,
                is_proven=execution.is_shown and resume is not None and resume.location is not None,
                received_ids=asked.received_ids,
            ),
            logprobs=asked.logprobs,
            explain=asked.explain,
            traceparent=arrival.traceparent,
            digest=digest,
            moves=arrival.moves,
            left_regions=arrival.left_regions,
        )

    def _check_features(self, asked: ValidRequest, chosen: ChosenPool) -> None:
        """Raise MeshError if the engines of the pool lack a feature that the request needs."""
        needs = asked.sampling.resolved.needs()
        missing = self._core.peers.missing(chosen.pool, needs.keys())  # the replica looks again
        violations = [
            Violation(
                field, "set", f"the engines of pool {chosen.pool} do not offer {feature}", is_clause=True
            )
            for feature, field in needs.items()
            if feature in missing
        ]
        if violations:
            raise invalid("FEATURE_UNSUPPORTED", violations)

    def _check_time(
        self, asked: ValidRequest, arrival: Arrival, timing: Timing, prompt_tokens: int, chosen: ChosenPool
    ) -> None:
        """Raise MeshError if the deadline has passed, or is too short for a start; a running attempt may be taken over."""
        now_s = self._clock.now_s()
        if timing.deadline_s <= now_s:
            is_rest = asked.resume is not None or bool(asked.idempotency_key)
            allowed_s = max(0.0, timing.deadline_s - timing.arrived_s)
            raise faults.deadline("DEADLINE", allowed_s, 0, is_rest=is_rest)
        if asked.received_ids:
            return
        left_s = timing.left_s(now_s)
        if left_s < self._start_min_s:
            priority_class = arrival.caller.service_class.priority_class
            outlook = self._core.outlook(asked.session_id, priority_class, prompt_tokens, now_s, chosen)
            raise faults.too_short(left_s, self._start_min_s, outlook.until_first_token_s)

    def _location(self, resume: ResumeToken | None, chosen: ChosenPool) -> AttemptLocation | None:
        """Return the location of the running attempt, if the routers of the pool `chosen` can take it over."""
        if resume is None or resume.location is None:
            return None
        own, (region, pool) = self._core.regions.settings.own, split(chosen.pool)
        if (resume.location.region or own) != (region or own) or resume.pool not in ("", pool):
            return None
        return resume.location

    def _clamped(self, asked: ValidRequest, wanted: int, deadline_s: float, outlook: Outlook) -> int:
        """Return the output tokens for which the client's deadline leaves time."""
        left_s, received = deadline_s - self._clock.now_s(), len(asked.received_ids)
        return feasibility.output_tokens(left_s, received, wanted, outlook)

    def _request_id(self, message: Message, tenant: str) -> str:
        """Return the request's id: that of its resume token, one derived from its key at every frontend, or a new one.

        Tenants do not share idempotency keys: a tenant that knows another's key must not reach its request.
        """
        if message.resume is not None:
            return message.resume.request_id
        key = message.request.idempotency_key
        if key:
            return self._seal.name(f"{tenant}\0{key}" if tenant else key)
        return f"{self._random_bits(128):032x}"

    async def _begin(
        self,
        asked: ValidRequest,
        request_id: str,
        digest: int,
        arrival: Arrival,
        chosen: ChosenPool,
        replaced: str,
    ) -> Execution:
        """Return the execution that starts now. Raises MeshError and PoolClaimed.

        Only a request that may have run before gets a number from Redis, and claims its pool there.
        """
        resume = asked.resume
        seed = resume.seed if resume is not None else asked.seed
        is_seed_asked = seed is not None
        if seed is None:
            seed = self._random_bits(64)
        if resume is None and not asked.idempotency_key:
            return Execution(0, seed, is_fenced=True)
        least = resume.epoch + 1 if resume is not None else 0
        for other in self._core.admitted.executions(request_id):
            least = max(least, min(EPOCH_MAX, other.spec.execution.epoch + 1))
        claim = Claim(
            *(request_id, digest, seed, is_seed_asked, least, arrival.owner), is_continued=arrival.continues
        )
        pools = self._core.pools
        if pools.has_several or self._core.regions.has_others:
            replaced = replaced if resume is None else ANY_POOL
            claim = replace(claim, pool=chosen.pool, stable_pool=pools.stable, replaced_pool=replaced)
            if resume is None:
                claim = replace(claim, asked=f"{validation.asked_digest(asked):016x}")
        if resume is not None:
            inherited = len(asked.received_ids) if resume.location is not None else 0
            # Without a date the token may be old: then only the record in Redis proves the output that was given.
            age_s = wall_s() - resume.issued_s if resume.issued_s else math.inf
            claim = replace(claim, inherited=inherited, predecessor=resume.epoch, age_s=age_s)
        execution = await self._executions.begin(claim)
        if arrival.continues and not execution.is_fenced:
            raise faults.not_exact("Redis does not answer, which has its earlier executions")
        return execution


def _timing(asked: ValidRequest, arrival: Arrival) -> Timing:
    """Return the arrival and the deadlines of the request."""
    deadline_s, is_clients = _deadline(arrival)
    timeout_s = asked.ttft_timeout_s
    return Timing(
        arrived_s=arrival.at_s,
        deadline_s=deadline_s,
        is_clients_deadline=is_clients,
        ttft_deadline_s=None if timeout_s is None else arrival.at_s + timeout_s,
    )


def _deadline(arrival: Arrival) -> tuple[float, bool]:
    """Return the request's deadline, and True if it is the client's own."""
    service_class, remaining_s = arrival.caller.service_class, arrival.remaining_s
    if remaining_s is None:
        return arrival.at_s + service_class.default_deadline_s, False
    if remaining_s <= service_class.runtime_max_s:
        return from_remaining_s(remaining_s, arrival.at_s), True
    return arrival.at_s + service_class.runtime_max_s, False
