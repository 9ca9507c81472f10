"""The steps of a life: which job proves the present state, and which state follows. Pure.

A bound that is over means the next state. A replica leaves PROBING for SERVING, or for QUARANTINED after wrong golden
tokens that it gave twice to one prompt: batch-variant kernels may differ once by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from controlplane.warmup.actions import LifeAction, Order, Told
from controlplane.warmup.boots import Boots
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.fleet import Fleet, remember
from controlplane.warmup.job_table import JobTable
from controlplane.warmup.jobs import (
    SOURCE_S,
    PassJob,
    ProbeJob,
    ProbeResult,
    SeedJob,
    SeedResult,
    Target,
)
from controlplane.warmup.life import WARM_BY_SERVICE_S, Life
from controlplane.warmup.life_state import number_of
from controlplane.warmup.packages import NO_PACKAGE, Package, Packages
from controlplane.warmup.prompt_choice import (
    QUICK_PROMPTS,
    WARM_PROMPTS_MAX,
    PromptChoice,
    lengths_alone,
)
from controlplane.warmup.reference_learning import ReferenceLearning
from controlplane.warmup.references import References
from controlplane.warmup.settings import Seeding, WarmUpSettings
from controlplane.warmup.shapes import by_handoff, default_shapes, usable
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState

QUICK_S: Final = 2.0
"""Longest probe of a replica whose engine served before."""

HURRIED_S: Final = 3.0
"""Longest probe of a replica that its pool needs at once. One golden prompt, or a batch at a decode that users wait for.

A prefill has half of that time for the prompts of the batch, and no batch begins in the other half. So its steps at the
decode begin before its service.
"""

CANNOT_TELL_S: Final = 2.5
"""Time in which no replica can tell the golden tokens, though leases show some: then another one is not held for them.

A load stream that opens again shows them after a moment, and a new leader hears of them within the 2 s of
`kvmesh.snapshot.leader_search`.
"""

RETRY_S: Final = 1.0
"""Time from the end of a job without a proof to the next one."""

BACKGROUND_RETRY_S: Final = 30.0
"""The same for a replica that serves."""

BACKGROUND_PROBES_MAX: Final = 32
"""Probes of serving replicas at a time. A probe of suspects begins at once."""

ROW_TOKENS: Final = 16
"""Tokens of a row in a batch whose prompts a prefill computes, at most."""

SOURCE_PART: Final = 8
"""A batch takes one part in so many of the prefill's KV blocks at most: half of the lane of the control plane there."""

RESEND_S: Final = 1.0
"""Time after which an order that the replica has not followed is sent again."""

SEED_TRIES_MAX: Final = 3
"""Seedings of one boot, if they end with an error."""

SEED_SHARE: Final = 0.9
"""Share of a replica's KV blocks that seeding may fill."""

REASON_CHARACTERS_MAX: Final = 200

Routers: TypeAlias = Callable[[str], tuple[tuple[str, str], ...]]
"""Returns name and address of each router of a pool."""


class LifeSteps:
    """See the module. `emit` takes the actions, in order."""

    def __init__(
        self,
        settings: WarmUpSettings,
        references: References,
        learning: ReferenceLearning,
        fleet: Fleet,
        boots: Boots,
        packages: Packages,
        jobs: JobTable,
        bounds: Callable[[str], ModelBounds],
        emit: Callable[[LifeAction], None],
    ) -> None:
        self._settings = settings
        self._references = references
        self._learning = learning
        self._fleet = fleet
        self._boots = boots
        self._packages = packages
        self._jobs = jobs
        self._bounds = bounds
        self._emit = emit
        self._choice = PromptChoice(references, fleet)
        self._queues = UserQueues()
        self._background = 0
        """Probes of serving replicas under way."""

    def begin(self, queues: UserQueues) -> None:
        """Begin a step over all lives."""
        self._queues = queues
        self._background = sum(each.serves and each.job > 0 for each in self._fleet.lives.values())

    def advance(self, life: Life, routers: Routers, now_s: float) -> None:
        """Drive `life` on."""
        self._seed(life, routers, now_s)
        match life.state:
            case LifeState.STARTING:
                self._start(life, now_s)
            case LifeState.WARMING:
                self._warm(life, now_s)
            case LifeState.SEEDING:
                self._await_seed(life, now_s)
            case LifeState.PROBING:
                self._probe(life, now_s)
            case LifeState.SERVING:
                self._serve_on(life, now_s)
            case LifeState.QUARANTINED:
                pass
        is_behind = life.reported.rank < life.state.rank or (life.is_proved and not life.reported_proved)
        if is_behind and now_s - life.ordered_s >= RESEND_S:
            self._send(life, now_s)

    def keep_out(self, life: Life, now_s: float) -> None:
        """Quarantine `life` if its engine gave wrong golden tokens before: its service alone was started anew."""
        reason = self._fleet.quarantined.get(life.target.engine_boot_id)
        if reason is not None and life.state is not LifeState.QUARANTINED:
            self._jobs.end_all(life)
            self._go(life, LifeState.QUARANTINED, now_s, reason)

    def hurry(self, life: Life, now_s: float, *, is_awaited: bool) -> None:
        """Let a held replica serve after a short probe: its pool needs it. `is_awaited`: users wait for it."""
        life.is_hurried, life.is_awaited = True, is_awaited
        if life.state.rank <= LifeState.STARTING.rank:
            life.package = self._usable_package(life)
        package = self._package_of(life)
        if life.warmed_lengths is None and package is not None:
            # Its golden prompts then meet the cold shapes that its users meet anyway, and no others.
            shapes = usable(
                package.shape_list(), life.target.role, self._bounds(life.target.pool).prompt_tokens
            )
            life.warmed_lengths = lengths_alone(shapes)
            life.warmed_batch = min(WARM_PROMPTS_MAX, max(each.batch for each in shapes))
        if life.state is not LifeState.PROBING:
            self._go(life, LifeState.PROBING, now_s, "its pool needs it")

    # Held.

    def _start(self, life: Life, now_s: float) -> None:
        name = life.name
        if not life.target.engine_boot_id:
            life.reason = "waits for its engine"
        elif life.is_known_engine:
            self._go(life, LifeState.PROBING, now_s, "its engine served before")
        elif not self._boots.may_warm_up(name):
            self._go(life, LifeState.PROBING, now_s, "earlier boots ended during their warm-up")
        else:
            life.package = self._usable_package(life)
            self._go(life, LifeState.WARMING, now_s)
            self._warm(life, now_s)

    def _warm(self, life: Life, now_s: float) -> None:
        most_s = self._settings.warming_max_s
        if life.is_warm or life.age_s(now_s) >= most_s:
            is_seeded_now = self._settings.seeds and life.target.role == "prefill"
            after = LifeState.SEEDING if is_seeded_now else LifeState.PROBING
            self._go(life, after, now_s, "" if life.is_warm else f"not warm after {most_s:g} s")
        elif not life.job and now_s >= life.retry_s:
            bounds, package = self._bounds(life.target.pool), self._package_of(life)
            role, longest = life.target.role, bounds.prompt_tokens
            shapes = usable(package.shape_list(), role, longest) if package else default_shapes(role, longest)
            source = self._choice.source(life)
            if source is not None:
                shapes = by_handoff(shapes, bounds.local_prompt_tokens)
            life.warmed_lengths = lengths_alone(shapes)
            batches = (each.batch for each in shapes if each.batch <= WARM_PROMPTS_MAX)
            life.warmed_batch = max(batches, default=0)
            life.reason = f"pass {len(life.passes) + 1} over {len(shapes)} shapes"
            end_s, seed = life.since_s + most_s, int(now_s * 1000)
            row_blocks = -(-ROW_TOKENS // max(1, life.target.block_tokens))
            rows_max = bounds.blocks.get("prefill", 0) // SOURCE_PART // row_blocks
            job = PassJob(life.target, shapes, end_s, bounds.vocabulary_size, seed, source, rows_max)
            self._run(life, job)

    # Seeding at a prefill: beside the shapes and the golden prompts, because a pull computes nothing there.

    def _seed(self, life: Life, routers: Routers, now_s: float) -> None:
        """Begin the seeding of `life` as soon as it may."""
        if life.is_seeded or life.seed_job or life.state not in self._seeding_states(life):
            return
        if life.target.role == "decode" and (
            life.is_awaited or self._fleet.has_leased(life.target.pool, "prefill")
        ):
            life.is_seeded = True  # its users fill its cache, and further work would delay them
            return
        first_s = life.seen_s + life.times.get(LifeState.WARMING, 0.0)  # a replay follows the shapes
        if life.target.role == "decode":
            first_s = life.since_s  # of its service
        is_late = first_s + self._settings.seeding_max_s + self._settings.background_max_s <= now_s
        if life.is_known_engine or is_late or not self._boots.may_warm_up(life.name):
            life.is_seeded = True
            return
        if life.seed is not None and now_s < life.seed_began_s + life.seed.seconds + RETRY_S:
            return
        end_s = now_s + self._settings.seeding_max_s + self._settings.background_max_s
        job = self._seed_job(life, routers, end_s, now_s)
        if job is None:
            life.is_seeded = life.state is LifeState.SERVING
            return
        life.seed_began_s, life.seed_tries = now_s, life.seed_tries + 1
        life.risk_end_s = float("inf")
        self._jobs.seed(life, job)

    def _seeding_states(self, life: Life) -> tuple[LifeState, ...]:
        """Return the states in which a seeding may begin. A replay computes, so it follows the shapes.

        A decode is seeded in a pool without prefill replicas alone. Seeding computes there, so it runs in service.
        """
        if not self._settings.seeds:
            return ()
        if life.target.role == "decode":
            return (LifeState.SERVING,)
        after = (LifeState.SEEDING, LifeState.PROBING, LifeState.SERVING)
        return after if self._settings.seeding is Seeding.REPLAY else (LifeState.WARMING, *after)

    def take_seed(self, life: Life, result: SeedResult, now_s: float) -> None:
        """Take the result of a seeding."""
        life.seed = result
        life.has_copied = life.has_copied or result.pulled_blocks + result.replayed_blocks > 0
        life.is_seeded = not result.error or life.seed_tries >= SEED_TRIES_MAX

    def _await_seed(self, life: Life, now_s: float) -> None:
        """Hold the replica until its cache is seeded, at most for a while; the golden prompts run meanwhile."""
        if not life.seed_job or now_s >= life.seed_began_s + self._settings.seeding_max_s:
            self._go(life, LifeState.PROBING, now_s, keeps_job=True)
            self._probe(life, now_s)
        elif not life.job and not life.is_probed and now_s >= life.retry_s:
            if self._references.expected(life.key):
                self._begin_probe(life, now_s, now_s + self._settings.probing_max_s, is_short=False)
            life.reason = "copies hot prefixes"

    def _seed_job(self, life: Life, routers: Routers, end_s: float, now_s: float) -> SeedJob | None:
        """Return the job that fills the cache of `life`. None: there is nothing to fill it from. A decode pulls nothing.

        A source computes one token for each pull: one more cold shape at a source that its users warm up. Where users
        waited for both replicas, they fill both caches.
        """
        target, is_replay = life.target, self._settings.seeding is Seeding.REPLAY
        others = self._fleet.serving(target.pool, "prefill", life.key) if target.role == "prefill" else []
        sources = tuple(
            each.target
            for each in others
            if each.name != life.name and not (life.is_awaited and each.is_left_to_users(now_s))
        )
        prefixes, asked = (self._package_of(life) or NO_PACKAGE).token_prefixes(), routers(target.pool)
        if not ((sources or is_replay) and asked) and not prefixes:
            return None
        blocks = int(SEED_SHARE * self._bounds(target.pool).blocks.get(target.role, 0))
        is_empty = not life.has_copied
        return SeedJob(
            target, sources, asked, max(1, blocks), end_s, is_replay, prefixes, starts_empty=is_empty
        )

    # Golden prompts.

    def _probe(self, life: Life, now_s: float) -> None:
        is_short = (life.is_hurried or life.is_known_engine) and not life.suspects
        most_s = self._settings.probing_max_s
        if is_short:
            most_s = min(QUICK_S if life.is_known_engine else HURRIED_S, most_s)
        if life.is_probed:
            self._serve(life, now_s, is_proved=True)
        elif life.age_s(now_s) >= most_s:
            life.reason = life.reason or f"no proof after {most_s:g} s"
            # A prefill may be the cause; where users wait, it is the queue.
            life.runs_alone = life.runs_alone or (bool(life.positions) and not life.is_awaited)
            self._serve(life, now_s, is_proved=False, keeps_job=life.is_awaited)
        elif self._references.expected(life.key):
            is_late = is_short and life.is_awaited and life.age_s(now_s) > HURRIED_S / 2
            if not life.job and now_s >= life.retry_s and not is_late:
                end_s = life.since_s + (self._settings.probing_max_s if life.is_awaited else most_s)
                self._begin_probe(life, now_s, end_s, is_short=is_short)
        elif self._learning.can_tell(life.key, now_s):
            life.untold_s, life.reason = None, "waits for the golden tokens of its version"
        else:
            life.reason = "no replica can tell the golden tokens of its version"
            life.untold_s = now_s if life.untold_s is None else life.untold_s
            if now_s - life.untold_s >= CANNOT_TELL_S or not self._learning.has_referees(life.key):
                self._serve(life, now_s, is_proved=False)

    def _begin_probe(self, life: Life, now_s: float, end_s: float, *, is_short: bool) -> None:
        prompts = self._references.prompts(life.key)
        if life.serves or life.suspects:
            life.positions = self._choice.beside_users(life, prompts, now_s)
        else:
            life.positions = self._choice.before_service(life, prompts, is_short=is_short)
        peers = () if is_short or life.suspects or life.is_probed else self._peers(life)
        source = self._choice.source_of(life, prompts, life.positions)
        running_max = self._choice.running_max(life, is_short=is_short)
        if source is not None and not life.serves:
            life.positions = life.positions[: max(QUICK_PROMPTS, running_max)]  # one batch
        life.reason = f"runs {len(life.positions)} golden prompts"
        chosen = tuple(prompts[at] for at in life.positions)
        is_cold = is_short and (life.is_adopted or not life.is_known_engine)
        source_s = HURRIED_S / 2 if is_cold and not life.serves else SOURCE_S
        checks_cancel = not is_cold  # a cold engine may take seconds for it
        job = ProbeJob(life.target, chosen, peers, end_s, running_max, source, source_s, checks_cancel)
        self._jobs.run_for(life, job)

    def take_probe(self, life: Life, result: ProbeResult, now_s: float) -> None:
        """Take the result of a probe."""
        is_first_only = life.target.role == "prefill"
        found = self._references.compare(
            life.key, life.positions, result.answers, is_first_only=is_first_only
        )
        life.retry_s = now_s + (BACKGROUND_RETRY_S if life.serves else RETRY_S)
        if found.wrong & life.suspects:
            self._quarantine(life, found.difference, now_s)
            return
        if found.wrong:
            life.suspects |= found.wrong
            life.runs_alone, life.is_probed = True, False
            life.retry_s, life.reason = now_s, f"{found.difference}; once more"
            return
        life.passed |= found.equal
        if missing := result.error or found.missing:
            life.reason = missing
            if found.equal:
                return
            if life.is_awaited and (not life.serves or life.age_s(now_s) < self._awaited_max_s):
                # Time, the queue or cold steps are the cause, and no prefill. Nothing shows yet that its tokens are right.
                if life.serves:
                    life.retry_s = now_s + life.fruitless_pause_s
                    life.fruitless_pause_s = min(2 * life.fruitless_pause_s, BACKGROUND_RETRY_S)
                return
            if not life.runs_alone:
                life.retry_s = now_s  # once more without a prefill
            life.runs_alone = True
            return
        left = len(self._choice.left(life, now_s))
        if life.serves and not life.is_proved:
            life.reason = (
                f"{left} golden prompts are left, of which the next run within {BACKGROUND_RETRY_S:g} s"
                if left
                else f"its users warm it up: the proof ends after {WARM_BY_SERVICE_S:g} s of service"
            )
        if life.suspects:  # it gave the golden tokens now: the difference was chance
            self._emit(
                Told("replica.probed", life.name, f"{len(life.suspects)} golden prompts differed once")
            )
            life.suspects = frozenset()
        peers = result.handoffs_well + result.handoffs_failed
        if result.frees_blocks is False:
            life.reason = "a cancelled request kept its KV blocks for more than a second"
        elif 2 * result.handoffs_well < peers:
            life.reason = f"{result.handoffs_failed} of {peers} handoffs with its peers failed"
        elif not life.is_left_to_users(now_s):
            life.is_probed = True
            life.reason = "" if life.is_proved else life.reason
            if not left and now_s >= life.risk_end_s:
                life.retry_s = now_s  # no prompt follows, so nothing has to be spread

    @property
    def _awaited_max_s(self) -> float:
        """Time of service in which the probes of a replica end that began while its users warmed it up."""
        return WARM_BY_SERVICE_S + self._settings.probing_max_s

    def _quarantine(self, life: Life, difference: str, now_s: float) -> None:
        reason = f"wrong golden tokens: {difference}"
        remember(self._fleet.quarantined, life.target.engine_boot_id, reason)
        self._emit(Told("replica.quarantined", life.name, reason))
        self._jobs.end_all(life)
        self._go(life, LifeState.QUARANTINED, now_s, reason)

    # In service.

    def _serve(self, life: Life, now_s: float, *, is_proved: bool, keeps_job: bool = False) -> None:
        """Order `life` into service. `keeps_job`: its golden prompts go on there: their cold steps are paid for once."""
        is_full = life.is_known_engine or not life.is_hurried
        life.is_proved = is_proved and life.is_warm and is_full
        life.is_probed = life.is_proved
        remember(self._fleet.served, life.target.engine_boot_id, None)
        reason = "" if life.is_proved else life.reason
        self._go(life, LifeState.SERVING, now_s, reason, keeps_job=keeps_job)
        self._fleet.note_serving(life)
        if life.is_proved:
            life.retry_s = now_s + BACKGROUND_RETRY_S  # users come first

    def _serve_on(self, life: Life, now_s: float) -> None:
        """Finish the proof of a replica that serves."""
        is_settled = (life.is_seeded or not self._settings.seeds) and not life.seed_job
        if is_settled and now_s >= life.risk_end_s:
            self._boots.served(life.name)
        if life.job or now_s < life.retry_s or life.is_engine_silent or self._fleet.is_draining(life):
            return
        if not self._references.expected(life.key):
            return
        is_at_risk = is_settled and now_s < life.risk_end_s  # golden prompts show that the engine lives
        is_probed = life.is_probed or life.was_proved
        if life.suspects or is_at_risk or self._choice.left(life, now_s) or not is_probed:
            if self._may_probe(life, now_s):
                self._background += 1
                is_short = life.is_left_to_users(now_s)
                self._begin_probe(life, now_s, now_s + self._settings.probing_max_s, is_short=is_short)
        elif not life.is_proved and (life.is_warm or life.age_s(now_s) >= WARM_BY_SERVICE_S):
            life.is_proved, life.reason = True, ""
            self._send(life, now_s)

    def _may_probe(self, life: Life, now_s: float) -> bool:
        """True if a probe may run beside users. A cold replica with a queue works for its users first.

        One that users waited for has one golden prompt to pass, and the others run once its users have warmed it up.
        """
        if life.suspects:
            return True
        if life.is_left_to_users(now_s):
            if life.passed:
                life.reason = f"its users warm it up: golden prompts after {WARM_BY_SERVICE_S:g} s of service"
                return False
        elif life.is_cold(now_s) and self._queues.is_long_at(life.target.pool, life.name):
            life.reason = "its pool has a queue: golden prompts follow"
            return False
        return self._background < BACKGROUND_PROBES_MAX

    # Parts.

    def _run(self, life: Life, job: PassJob) -> None:
        """Run work that may end the boot."""
        life.risk_end_s = float("inf")
        self._jobs.run_for(life, job)

    def _usable_package(self, life: Life) -> str:
        """Return the name of the package for this boot; empty: none."""
        package = self._packages.usable(life.target.role, life.key)
        return package.name if package is not None and self._boots.may_use_package(life.name) else ""

    def _package_of(self, life: Life) -> Package | None:
        return self._packages.named(life.package) if life.package else None

    def _peers(self, life: Life) -> tuple[Target, ...]:
        """Return the serving replicas of the other role in the pool."""
        other = "decode" if life.target.role == "prefill" else "prefill"
        return tuple(each.target for each in self._fleet.serving(life.target.pool, other, life.key))

    def _go(
        self, life: Life, state: LifeState, now_s: float, reason: str = "", *, keeps_job: bool = False
    ) -> None:
        if not keeps_job:
            self._jobs.end(life)
        life.go(state, now_s, reason, keeps_job=keeps_job)
        self._send(life, now_s)

    def _send(self, life: Life, now_s: float) -> None:
        life.ordered_s = now_s
        order = pb.LifeOrder(
            state=number_of(life.state),
            engine_boot_id=life.target.engine_boot_id,
            proved=life.is_proved,
            slow_start=life.serves and not life.is_warm,
            reason=life.reason[:REASON_CHARACTERS_MAX],
            package=life.package,
        )
        self._emit(Order(life.name, life.target.boot_id, order))
