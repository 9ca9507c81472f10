"""The runs of the golden prompts during a rollout, and the result for its present step. Pure.

1. Once on a decode replica of the stable pool: the tokens that "exact" expects. "different" takes them from the version's
   own set.
2. In PREPARING, and again at each step, on each prefill and decode replica of the canary. A prefill replica is compared by
   first tokens.
3. In BAKING and PAUSED, each INTERVAL_S on one replica in turn.

A difference is final for the rollout. A run without all answers is inconclusive and is repeated after RETRY_S. Nothing is
stored: a new leader runs everything again, and until then nothing goes forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from controlplane.rollouts.document import WEIGHTED, RolloutDocument
from controlplane.rollouts.golden import Answer, GoldenSet, Prompt, compare
from controlplane.rollouts.settings import Expectation
from controlplane.rollouts.view import GoldenFacts, GoldenState
from kvmesh.snapshot.content import RolloutState

RUN_S: Final = 20.0
"""Longest run on one replica."""

EXPIRES_S: Final = RUN_S + 5.0
"""Time after which a run without a result counts as lost."""

INTERVAL_S: Final = 30.0
"""Time between two runs inside a step."""

RETRY_S: Final = 5.0
"""Time from the end of an inconclusive run to the next one on the replica."""

RUNS_MAX: Final = 4
"""Runs at a time."""

Key: TypeAlias = tuple[str, str]
"""Process id and boot id of a replica."""

ROLES: Final = ("prefill", "decode")


class Replica(Protocol):
    """A leased process, as `kvmesh.membership.member.Member` describes it."""

    @property
    def process_id(self) -> str: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def model_version(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def draining(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class GoldenRun:
    """One run of the prompts on one replica."""

    rollout: str
    step: int
    """Step of the document; 0 in PREPARING."""
    pool: str
    process_id: str
    boot_id: str
    role: str
    address: str
    model_version: str
    block_tokens: int
    prompts: tuple[Prompt, ...]
    is_reference: bool = False
    """True for the run on the stable pool."""


@dataclass(slots=True)
class _Result:
    """Last result of one replica."""

    state: GoldenState
    reason: str
    step: int
    ended_s: float


@dataclass(slots=True)
class _Runs:
    """All runs for one rollout."""

    rollout: str = ""
    prompts: tuple[Prompt, ...] = ()
    """Empty: the version has no golden set."""
    expected: tuple[tuple[int, ...], ...] = ()
    """Empty: the stable pool has not answered."""
    running: dict[Key, float] = field(default_factory=dict)
    """Replica -> time of the start."""
    results: dict[Key, _Result] = field(default_factory=dict)
    present: dict[Key, str] = field(default_factory=dict)
    """Replica of the canary -> role, at the last call of `due`."""
    reference_retry_s: dict[Key, float] = field(default_factory=dict)
    reference_error: str = ""
    red: str = ""
    """First difference. Empty: none."""
    ran_s: float = float("-inf")
    """Time of the last start."""


class GoldenSchedule:
    """See the module. `prompts`: the fixed set. `sets`: golden sets by model version.

    INVARIANT: at most RUNS_MAX runs are under way, at most one for each replica.
    """

    def __init__(self, prompts: tuple[Prompt, ...], sets: Mapping[str, GoldenSet]) -> None:
        self._fixed = prompts
        self._sets = sets
        self._runs = _Runs()

    def due(self, document: RolloutDocument, members: Iterable[Replica], now_s: float) -> list[GoldenRun]:
        """Return the runs to start now. `now_s`: monotonic clock."""
        self._follow(document)
        self._runs.running = {
            key: at_s for key, at_s in self._runs.running.items() if now_s - at_s < EXPIRES_S
        }
        replicas = [each for each in members if each.role in ROLES and not each.draining]
        canary = {_key(each): each for each in replicas if each.pool == document.to_pool}
        self._runs.present = {key: each.role for key, each in canary.items()}
        self._runs.results = {key: result for key, result in self._runs.results.items() if key in canary}
        if self._runs.red or not self._runs.prompts:
            return []
        if not self._runs.expected:
            stable = [each for each in replicas if each.pool == document.from_pool and each.role == "decode"]
            return self._reference_due(document, stable, now_s)
        step = _step(document)
        keys = [key for key in sorted(canary) if self._is_due(key, step, now_s)]
        if not keys and document.state in WEIGHTED and now_s - self._runs.ran_s >= INTERVAL_S:
            keys = self._in_turn(now_s)
        free = max(0, RUNS_MAX - len(self._runs.running))
        return [self._start(document, canary[key], now_s, is_reference=False) for key in keys[:free]]

    def take(self, run: GoldenRun, answers: tuple[Answer, ...], now_s: float) -> None:
        """Take the result of a run: one answer for each prompt. A run of another rollout is ignored."""
        key = (run.process_id, run.boot_id)
        self._runs.running.pop(key, None)
        if run.rollout != self._runs.rollout or run.prompts != self._runs.prompts:
            return
        if run.is_reference:
            self._take_reference(key, answers, now_s)
            return
        if not self._runs.expected:
            return
        if len(answers) != len(run.prompts):
            self._runs.results[key] = _Result(GoldenState.MISSING, "no answer", run.step, now_s)
            return
        found = compare(run.prompts, self._runs.expected, answers, is_first_only=run.role == "prefill")
        if found.state is GoldenState.RED:
            self._runs.red = f"{run.process_id}: {found.reason}"
        self._runs.results[key] = _Result(found.state, found.reason, run.step, now_s)

    def facts(self, document: RolloutDocument) -> GoldenFacts:
        """Return the result for the present step of `document`."""
        step = _step(document)
        if document.id != self._runs.rollout:
            return GoldenFacts(step, GoldenState.MISSING, "they have not run yet")
        if self._runs.red:
            return GoldenFacts(step, GoldenState.RED, self._runs.red)
        missing = self._missing(document, step)
        if missing:
            return GoldenFacts(step, GoldenState.MISSING, missing)
        return GoldenFacts(step, GoldenState.GREEN)

    def _follow(self, document: RolloutDocument) -> None:
        """Start anew for another rollout."""
        if document.id == self._runs.rollout:
            return
        if document.settings.expectation is Expectation.EXACT:
            self._runs = _Runs(document.id, self._fixed)
            return
        own = self._sets.get(document.to_version, GoldenSet((), ()))
        self._runs = _Runs(document.id, own.prompts, own.outputs)

    def _missing(self, document: RolloutDocument, step: int) -> str:
        """Return why the result is not green yet. Empty: it is."""
        if not self._runs.prompts:
            return f'the version "{document.to_version}" has no golden set'
        if not self._runs.expected:
            why = f": {self._runs.reference_error}" if self._runs.reference_error else ""
            return f'the stable pool "{document.from_pool}" has not answered{why}'
        roles = set(self._runs.present.values())
        without = [role for role in ROLES if role not in roles]
        if without:
            return f'the pool "{document.to_pool}" has no {" and no ".join(without)}'
        for key in sorted(self._runs.present):
            result = self._runs.results.get(key)
            if result is None or result.step != step:
                return f"{key[0]} has not answered"
            if result.state is not GoldenState.GREEN:
                return f"{key[0]}: {result.reason}"
        return ""

    def _is_due(self, key: Key, step: int, now_s: float) -> bool:
        """True if the replica has no result for `step`, or an inconclusive one that is old enough."""
        if key in self._runs.running:
            return False
        result = self._runs.results.get(key)
        if result is None or (result.step != step and result.state is GoldenState.GREEN):
            return True
        return result.state is GoldenState.MISSING and now_s - result.ended_s >= RETRY_S

    def _in_turn(self, now_s: float) -> list[Key]:
        """Return the replica whose last run is the oldest, unless a run is under way."""
        if self._runs.running or not self._runs.results:
            return []
        return [min(self._runs.results, key=lambda key: (self._runs.results[key].ended_s, key))]

    def _reference_due(
        self, document: RolloutDocument, stable: list[Replica], now_s: float
    ) -> list[GoldenRun]:
        if self._runs.running:
            return []
        ready = [each for each in stable if self._runs.reference_retry_s.get(_key(each), now_s) <= now_s]
        if not ready:
            return []
        chosen = min(ready, key=lambda each: (self._runs.reference_retry_s.get(_key(each), 0.0), _key(each)))
        return [self._start(document, chosen, now_s, is_reference=True)]

    def _take_reference(self, key: Key, answers: tuple[Answer, ...], now_s: float) -> None:
        absent = next((each.error for each in answers if each.error), "")
        if absent or len(answers) != len(self._runs.prompts):
            self._runs.reference_error = f"{key[0]}: {absent or 'no answer'}"
            self._runs.reference_retry_s[key] = now_s + RETRY_S
            return
        self._runs.expected = tuple(answer.token_ids for answer in answers)

    def _start(
        self, document: RolloutDocument, replica: Replica, now_s: float, *, is_reference: bool
    ) -> GoldenRun:
        self._runs.running[_key(replica)] = now_s
        self._runs.ran_s = now_s
        return GoldenRun(
            document.id,
            _step(document),
            replica.pool,
            replica.process_id,
            replica.boot_id,
            replica.role,
            replica.address,
            replica.model_version,
            replica.block_tokens,
            self._runs.prompts,
            is_reference,
        )


def _key(replica: Replica) -> Key:
    return replica.process_id, replica.boot_id


def _step(document: RolloutDocument) -> int:
    return 0 if document.state is RolloutState.PREPARING else document.step
