"""Versions side by side: the cost of choosing a request's pool, of observing it for the judge, and of the tap of shadows.

The process under test is this module as a process, with the frontend's own choice and observations, three pools and two
routers each. Neither awaits anything, so that the CPU time of a batch is the cost of its requests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from bench import aims, control
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults
from bench.windows import Pace
from kvmesh.attach.outbox import UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.detokenizer import ByteDetokenizer
from kvmesh.regions.names import qualified
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.regions import RegionEntry
from kvmesh.snapshot.shadow import Shadow
from kvmesh.tenants.caller import Tenant
from services.frontend.requests.attempts import Attempt
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.outcome import Outcome
from services.frontend.requests.output import Output
from services.frontend.requests.region_choice import RegionSettings
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RequestSpec, Timing
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.requests.sampling import Sampling
from services.frontend.shadow.shadow_core import ShadowCore
from services.frontend.shadow.traffic import ShadowTraffic
from services.frontend.surface.service import InferenceService

REQUESTS: Final = 20_000
QUICK_REQUESTS: Final = 5_000
BATCH: Final = 200
"""Requests between two batches of observations, a second of load."""

OUTPUT_TOKENS: Final = 200
TIMEOUT_S: Final = 120.0

CONTENT: Final = Content(
    (
        PoolTrack("stable", "v1", Track.STABLE, 90),
        PoolTrack("canary", "v2", Track.CANARY, 5),
        PoolTrack("baseline", "v1", Track.BASELINE, 5),
    ),
    rollout="rollout-1",
)


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        probe = fleet.start_ready("versions", __name__, TEST_CORE)
        requests = QUICK_REQUESTS if pace.is_quick else REQUESTS
        chosen = probe.ask("choose", requests=requests, timeout_s=TIMEOUT_S)
        observed = probe.ask("observe", requests=requests, timeout_s=TIMEOUT_S)
        tapped = probe.ask("tap", requests=requests, timeout_s=TIMEOUT_S)
        located = probe.ask("locate", requests=requests, timeout_s=TIMEOUT_S)
    results.add(aims.THREE_POOLS, aims.VERSION_CHOICE, "us", chosen["us"])
    results.add(aims.THREE_REGIONS, aims.REGION_CHOICE, "us", located["us"])
    results.add(aims.THREE_REGIONS, "the same, with spill to both others", "us", located["spill_us"])
    results.add(aims.OBSERVED, aims.OBSERVATION, "us", observed["us"])
    results.add(aims.OBSERVED, "CPU of the count of a request, without a rollout", "us", observed["count_us"])
    results.add(aims.TAPPED, aims.TAP_OFF, "us", tapped["off_us"])
    results.add(
        aims.TAPPED, "CPU of a request's tap, a session outside the sample", "us", tapped["outside_us"]
    )
    results.add(aims.TAPPED, "CPU of a request's tap, full queue", "us", tapped["full_us"])


def _region_core(others: Sequence[str]) -> FrontendCore:
    """Return a core in region "eu" with two routers in each region, all up."""
    names = frozenset(("eu", *others)) if others else frozenset[str]()
    core = FrontendCore(
        Limits(3, 5.0, 32),
        limit=64,
        retries=RetryBudget(0.1, 3.0, 0.0),
        jitter=lambda: 0.5,
        regions=RegionSettings("eu", names),
    )
    stable = PoolTrack("default", "v1", Track.STABLE, 100)
    entries = [RegionEntry(name, stable_version="v1", stable_pool="default") for name in names]
    core.take_snapshot(Content((stable,), regions=tuple(entries)))
    for region in ("", *others):
        for number in range(2):
            name = qualified(region, f"router-{number}")
            link = SimpleNamespace(name=name, is_up=True, outbox=UpwardOutbox())
            core.add_router(link, "default", "v1", region)
    return core


def _spec(number: int, pool: str, home: str = "") -> RequestSpec:
    return RequestSpec(
        request_id=f"{number:032x}",
        prompt_ids=bytes(4 * 256),
        sampling=Sampling(1.0, 1.0, 0, 7),
        max_output_tokens=OUTPUT_TOKENS,
        pool=pool,
        home=home,
        border=home,
        model_version="v1",
        end_token_ids=frozenset({1}),
        session_id=f"session-{number}",
        timing=Timing(arrived_s=1000.0, deadline_s=1600.0),
    )


class VersionsProbe:
    """A core with routers that are up, and no stream."""

    def __init__(self) -> None:
        self._core = FrontendCore(
            Limits(3, 5.0, 32), limit=64, retries=RetryBudget(0.1, 3.0, 0.0), jitter=lambda: 0.5
        )
        self._core.take_snapshot(CONTENT)
        for track in CONTENT.pools:
            for number in range(2):
                link = SimpleNamespace(name=f"{track.pool}-{number}", is_up=True, outbox=UpwardOutbox())
                self._core.add_router(link, track.pool, track.model_version)

    async def choose(self, requests: int) -> Mapping[str, Any]:
        """Choose the pool of `requests` sessions. Return `us`, CPU microseconds per choice in the cheapest batch."""
        sessions = [f"session-{number}" for number in range(requests)]
        pools, least_ns = self._core.pools, float("inf")
        gc.collect()
        for first in range(0, requests, BATCH):
            batch = sessions[first : first + BATCH]
            began_ns = time.process_time_ns()
            for session in batch:
                pools.choose("tenant", session)
            least_ns = min(least_ns, time.process_time_ns() - began_ns)
        return {"us": least_ns / 1e3 / BATCH}

    async def locate(self, requests: int) -> Mapping[str, Any]:
        """Choose region, pool and router of `requests` sessions in three regions.

        Return `us`, CPU microseconds per request above those of a mesh without regions, and `spill_us` with spill.
        """
        sessions = [f"session-{number}" for number in range(requests)]
        alone_us = self._locate(_region_core(()), sessions)
        core = _region_core(("us", "ap"))
        us = self._locate(core, sessions)
        core.regions.take_shares({"us": 0.2, "ap": 0.2}, 0.0)
        return {"us": us - alone_us, "spill_us": self._locate(core, sessions) - alone_us}

    def _locate(self, core: FrontendCore, sessions: list[str]) -> float:
        tenant, spec, least_ns = Tenant(name="tenant"), _spec(0, pool="default", home="eu"), float("inf")
        gc.collect()
        for first in range(0, len(sessions), BATCH):
            batch = sessions[first : first + BATCH]
            began_ns = time.process_time_ns()
            for session in batch:
                chosen = core.regions.choose(tenant, session, "eu", 0.0)
                if core.regions.has_others:  # as LiveRequest.submit does
                    core.regions.elsewhere(spec, may_rebind=True)
                core.peers.choose(chosen.pool, session, model_version=chosen.model_version)
            least_ns = min(least_ns, time.process_time_ns() - began_ns)
        return least_ns / 1e3 / BATCH

    async def observe(self, requests: int) -> Mapping[str, Any]:
        """Observe `requests` requests of OUTPUT_TOKENS tokens, and send their batches.

        Return `us`, CPU microseconds per request in the cheapest batch with a rollout, and `count_us` without one, where no
        token is noted.
        """
        self._observe(BATCH)
        cost_us = self._observe(requests)
        self._core.observations.take_rollout("")
        return {"us": cost_us, "count_us": self._observe(requests, tokens=0)}

    async def tap(self, requests: int) -> Mapping[str, Any]:
        """Show `requests` requests to the tap. Return CPU microseconds of each in the cheapest batch.

        `off_us`: no shadow is in force. `outside_us`: the shadow samples other sessions. `full_us`: it samples all, and its
        queue is full, as with a target that takes nothing.
        """
        service = InferenceService.__new__(InferenceService)  # the tap is all that the loop needs of it
        service.tap = None
        ended = [self._ended(number) for number in range(BATCH)]
        stable = CONTENT.stable
        for request in ended:
            request.spec = replace(request.spec, pool=stable.pool, model_version=stable.model_version)
        off_us = self._tap(service, ended, requests)
        costs = []
        for permille in (1, 1000):
            traffic = ShadowTraffic(
                self._core,
                lambda observer: ShadowCore(32, observer, 0.0),
                detokenizer=lambda _: ByteDetokenizer([b"a"] * 16),
                share_tokenizer=lambda _, __: True,
                wall_s=lambda: 0.0,
            )
            shadow = Shadow(
                id="shadow-1",
                to_pool="baseline",
                sample_permille=permille,
                token_max=10**9,
                expires_ms=10**12,
            )
            traffic.take(replace(CONTENT, shadows=(shadow,)), 0.0)
            service.tap = partial(traffic.offer, now_s=0.0)
            costs.append(self._tap(service, ended, requests))
        return {"off_us": off_us, "outside_us": costs[0], "full_us": costs[1]}

    def _tap(self, service: InferenceService, ended: list[LiveRequest], count: int) -> float:
        least_ns = float("inf")
        gc.collect()
        for _ in range(count // BATCH):
            began_ns = time.process_time_ns()
            for request in ended:
                if service.tap is not None:
                    service.tap(request)
            least_ns = min(least_ns, time.process_time_ns() - began_ns)
        return least_ns / 1e3 / BATCH

    def _observe(self, count: int, tokens: int = OUTPUT_TOKENS) -> float:
        least_ns, now_s = float("inf"), 1000.0
        for _ in range(count // BATCH):
            ended = [self._ended(number) for number in range(BATCH)]
            gc.collect()
            times = [now_s + 0.02 * at for at in range(tokens)]
            empty_ns = self._tokens(ended, times)
            began_ns = time.process_time_ns()
            observations = self._core.observations
            for request in ended:
                observations.on_start(request)
            self._tokens(ended, times)
            for request in ended:
                observations.on_end(request)
            now_s += 1.0
            batch = observations.drain(now_s)
            if batch is not None:
                batch.SerializeToString()
                observations.confirm(batch.sequence)
            least_ns = min(least_ns, time.process_time_ns() - began_ns - empty_ns)
        return least_ns / 1e3 / BATCH

    def _tokens(self, requests: list[LiveRequest], times: list[float]) -> int:
        """Note the times of all tokens, as the core does; return the nanoseconds."""
        began_ns = time.process_time_ns()
        for request in requests:
            for now_s in times:
                note_token_s = request.note_token_s
                if note_token_s is not None:
                    note_token_s(now_s)
        return time.process_time_ns() - began_ns

    def _ended(self, number: int) -> LiveRequest:
        """Return a request as it is at its end, not observed yet."""
        spec = replace(_spec(number, pool="canary"), model_version="v2", rollout="rollout-1")
        output = Output(ByteDetokenizer([b"a"] * 16), (), with_logprobs=False)
        request = LiveRequest(spec, output, self._core, Limits(3, 5.0, 32))
        attempt = Attempt(1, pb.AttemptExplanation.CAUSE_FIRST, 0, 256, "canary-0", 1000.0)
        attempt.placement = attach.Placement(
            prefill_replica="prefill-0", decode_replica="decode-0", queue_us=500, decode_running_count=9
        )
        request.upstream.attempts.append(attempt)
        request.progress.ids.extend([5] * OUTPUT_TOKENS)
        request.progress.first_token_s, request.progress.cached_tokens = 1000.3, 128
        request.outcome = Outcome(finish_reason=pb.FINISH_REASON_LENGTH)
        request.ended_s = 1004.0
        return request


async def serve() -> None:
    """Serve until stdin ends."""
    probe = VersionsProbe()
    await control.serve_commands(probe.choose, probe.observe, probe.tap, probe.locate)


if __name__ == "__main__":
    control.main(serve, __doc__)
