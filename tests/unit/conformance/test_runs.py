"""Runs of all checks: interrupted ones, hanging engines, engines that serve others, models that tell little."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from engines.contract.request import ControlRequest
from kvmesh.conformance.assembly import Target, opened_trial
from kvmesh.conformance.checks.all_checks import all_checks
from kvmesh.conformance.offer import Disagreement
from kvmesh.conformance.runner import HOSTILE, LOST, NO_PAIR, NO_WATCH, run_checks
from kvmesh.conformance.session import Session
from kvmesh.conformance.trial import Settings
from kvmesh.conformance.verdict import Outcome, Row
from kvmesh.triton.errors import EngineLost
from kvmesh.triton.server_metrics import ServerMetrics
from tests.unit.conformance.fake_server import CONFIG, FakeServer, Stream
from tests.unit.conformance.runs import CANCELS, SETTLE_S, by_outcome, failed, run
from tests.unit.frontend.budgets.virtual_time import simulate

INTERRUPTS = 8
RUN_S = 30.0
"""Virtual seconds of a whole run, and a little more."""


def test_an_interrupted_run_leaves_nothing() -> None:
    """Whenever the run is cancelled: no call, no handoff and no subscription is left in either engine."""
    for _ in range(INTERRUPTS):
        seed = random.Random().randrange(1 << 32)
        simulate(_interrupted(seed))


async def _interrupted(seed: int) -> None:
    peers: dict[str, FakeServer] = {}
    engine, other = FakeServer("a:1", peers), FakeServer("b:1", peers)
    settings = Settings(cancels=CANCELS, is_hostile=True, seed=seed)

    async def work() -> None:
        async with opened_trial(Target(client=engine, pair=other, sizes={}), settings) as trial:
            await run_checks(trial, all_checks(CANCELS), lambda check, row: None)

    running = asyncio.create_task(work())
    await asyncio.wait((running,), timeout=random.Random(seed).uniform(0.0, RUN_S))
    running.cancel()
    await asyncio.wait((running,), timeout=10.0)
    assert running.done(), seed
    await asyncio.sleep(SETTLE_S)
    for server in (engine, other):
        assert server.is_empty() and not server.streams and not server.loads and not server.events, seed


class Silent(FakeServer):
    """Takes each request, and answers none of them."""

    def take(self, stream: Stream) -> None:
        pass


def test_an_engine_that_never_answers_ends_the_run() -> None:
    """The first check that calls it fails, and no later one is judged."""
    rows, _ = run(Silent, pair=Silent)
    assert set(failed(rows)) == {"streaming: several responses before the end"}
    assert sum(row.seconds for row in rows) < 30


class DiesLater(FakeServer):
    """The server ends at the first context_only call."""

    def take(self, stream: Stream) -> None:
        if stream.parameters.get("request_type") == "context_only":
            self.is_alive = False
        super().take(stream)


def test_behind_the_end_of_an_engine_nothing_is_judged() -> None:
    """One check fails, and each later one says that the engine is gone."""
    rows, _ = run(DiesLater, has_pair=False)
    assert len(failed(rows)) == 1
    gone = [row.verdict.why for row in rows if row.verdict.outcome is Outcome.NOT_JUDGED]
    assert gone.count(LOST) > 10


RATES = (0.5, 8.0)
"""Calls of other clients in each second."""


def test_other_requests_fail_no_check() -> None:
    """Calls of others at random times, short and long ones: none of their blocks is taken for a leak."""
    judged = 0
    for rate in RATES:
        seed = random.Random().randrange(1 << 32)
        rows = simulate(_beside_others(seed, rate))
        assert failed(rows) == {}, seed
        judged += sum(row.verdict.why == "other requests ran" for row in rows)
    assert judged, "no check saw the others"


async def _beside_others(seed: int, rate: float) -> list[Row]:
    engine = FakeServer("a:1")
    settings = Settings(cancels=CANCELS)
    async with opened_trial(Target(client=engine, sizes={}), settings) as trial:
        others = asyncio.create_task(_others(engine, Session(engine, trial.offer, 16, "other"), seed, rate))
        checks = [check for check in all_checks(CANCELS) if check.needs_watch or rate < 1]
        rows = await run_checks(trial, checks, lambda check, row: None)
        others.cancel()
        await asyncio.wait((others,))
    await asyncio.sleep(SETTLE_S)
    assert engine.is_empty(), seed
    return rows


async def _others(engine: FakeServer, session: Session, seed: int, rate: float) -> None:
    """Send calls of other clients at random times."""
    assert engine.is_alive
    chance = random.Random(seed)
    async with asyncio.TaskGroup() as calls:
        while True:
            await asyncio.sleep(chance.expovariate(rate))
            calls.create_task(session.ask(chance.choices(range(300, 900), k=40), chance.randint(1, 80)))


def stock(server: FakeServer) -> None:
    """Make the model tell as little as the stock one."""
    server.parameters = {}
    for name in ("return_top_log_probs",):
        del server.inputs[name]
    for name in ("kv_events", "load_report", "top_log_prob_ids", "top_log_probs"):
        del server.outputs[name]


def test_a_model_that_tells_little_fails_no_check() -> None:
    """Each missing part has a fallback, and each unknown size an option."""
    rows, _ = run(changed=stock, has_pair=False, is_hostile=False)
    assert failed(rows) == {}
    for row in rows:
        if row.verdict.outcome is Outcome.NOT_OFFERED:
            assert "; fallback: " in row.verdict.why
        if row.verdict.outcome is Outcome.NOT_JUDGED:
            assert row.verdict.why in (NO_PAIR, NO_WATCH, HOSTILE) or "give --" in row.verdict.why


def test_sizes_of_the_operator_are_taken() -> None:
    """Facts that the model does not tell may be given, and then are judged."""
    sizes = {
        "vocab_size": CONFIG.vocab_size,
        "tokens_per_block": CONFIG.block_tokens,
        "max_sequence_tokens": 256,
    }
    rows, _ = run(changed=stock, sizes=sizes)
    assert failed(rows) == {}
    assert not [row for row in rows if "give --" in row.verdict.why]
    assert "limits: the longest sequence" in by_outcome(rows, Outcome.PASS)


def test_sizes_that_differ_are_refused() -> None:
    """The sentence has both values."""
    with pytest.raises(Disagreement, match=r"vocab_size is 1024 .* but 5000"):
        run(sizes={"vocab_size": 5000})


def test_a_pair_of_another_model_is_refused() -> None:
    """Its digest or a size differs."""

    def changed(server: FakeServer) -> None:
        server.parameters["engine_digest"] = server.address

    with pytest.raises(Disagreement, match="--pair serves another model: engine_digest is b:1"):
        run(changed=changed)


class HidesEndToken(FakeServer):
    """As TensorRT-LLM's C++ backend."""

    def response(self, stream: Stream, output: Any) -> Any:
        request = stream.request
        if request is not None and output.tokens and output.tokens[-1] in request.end_ids:
            output.tokens.pop()
            output.log_probs = output.log_probs[: len(output.tokens)]
        return super().response(stream, output)


def test_a_hidden_end_token_is_a_capability() -> None:
    """It is not offered; a parameter that promises it fails."""

    def hides(server: FakeServer) -> None:
        server.parameters["end_token"] = "false"

    rows, _ = run(HidesEndToken, changed=hides, pair=HidesEndToken)
    assert failed(rows) == {}
    absent = by_outcome(rows, Outcome.NOT_OFFERED)
    assert [row for row in absent if "step_frames" not in row] == ["end_token: end token in the output"]
    rows, _ = run(HidesEndToken)
    assert set(failed(rows)) == {"end_token: end token in the output"}


class Flips(FakeServer):
    """Kernels whose results vary: sometimes another token."""

    def response(self, stream: Stream, output: Any) -> Any:
        if stream.key % 7 == 0 and stream.is_plain and len(output.tokens):
            output.tokens[-1] = 500 + stream.key % 64
        return super().response(stream, output)


def test_results_that_vary_fail_no_comparison() -> None:
    """An engine that is not batch-invariant is no broken one: comparisons are not judged."""
    rows, _ = run(Flips, pair=Flips)
    assert failed(rows) == {}


class NoPositions(FakeServer):
    """Knows neither `after` nor `max_bytes`."""

    def serve(self, kind: ControlRequest, stream: Stream) -> None:
        for name in ("after", "max_bytes"):
            stream.parameters.pop(name, None)
        super().serve(kind, stream)


def test_positions_of_events_are_capabilities() -> None:
    """Without them each subscription has a snapshot, and the replica ends it."""
    rows, _ = run(NoPositions)
    assert failed(rows) == {}
    absent = by_outcome(rows, Outcome.NOT_OFFERED)
    positions = ["kv_events: after resumes", "kv_events: max_bytes ends"]
    assert [row for row in absent if "step_frames" not in row] == positions


class Counting(FakeServer):
    """Counts calls that are open at once, and the blocks that they need."""

    most = most_blocks = 0

    def step(self) -> bool:
        load = self.core.load()
        self.most = max(self.most, load.sequences_running + load.sequences_waiting)
        self.most_blocks = max(self.most_blocks, load.blocks_total - load.blocks_free)
        return super().step()


def test_a_run_takes_a_small_share() -> None:
    """At most four calls at once, and an eighth of the blocks beside the handoffs that are held."""
    rows, server = run(Counting)
    assert isinstance(server, Counting) and failed(rows) == {}
    assert 1 <= server.most <= 4
    assert server.most_blocks <= CONFIG.kv_blocks // 8


def test_an_unreachable_model_is_an_error_of_the_call() -> None:
    """The command says so, with exit status 2."""

    class Gone(FakeServer):
        async def describe(self) -> tuple[Any, Any]:
            raise EngineLost("refused")

    with pytest.raises(EngineLost):
        run(Gone)


class Metered(FakeServer):
    """Tells its load by metrics, as of its last step with rows."""

    used = active = 0

    def step(self) -> bool:
        running = len(self.core.scheduler.running)
        is_busy = super().step()
        if running:
            load = self.core.load()
            self.used, self.active = load.blocks_total - load.blocks_free, max(1, load.sequences_running)
        return is_busy

    def metrics(self) -> ServerMetrics:
        total = CONFIG.kv_blocks if self.active else 0  # nothing before the first step
        return ServerMetrics(total, CONFIG.block_tokens, blocks_free=total - self.used, running=self.active)


class MeteredLeak(Metered):
    """A cancelled call stays in the engine."""

    def cancel(self, sequence: Any) -> None:
        sequence.is_hung = True


@pytest.mark.parametrize("kind", [Metered, MeteredLeak])
def test_metrics_show_a_leak(kind: type[Metered], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine has no load report. They are told while the engine runs steps alone."""
    engine = kind("a:1")
    stock(engine)

    async def fetch(address: str, model: str) -> ServerMetrics:
        assert (address, model) == ("m:1", "tensorrt_llm")
        return engine.metrics()

    async def work() -> list[Row]:
        target = Target(client=engine, metrics="m:1", sizes={})
        async with opened_trial(target, Settings(cancels=CANCELS)) as trial:
            assert trial.offer.kv_blocks == CONFIG.kv_blocks and trial.block_tokens == CONFIG.block_tokens
            rows = await run_checks(trial, all_checks(CANCELS), lambda check, row: None)
        await asyncio.sleep(SETTLE_S)
        return rows

    monkeypatch.setattr("kvmesh.conformance.state_watch.metrics_at", fetch)
    rows = simulate(work())
    if kind is Metered:
        assert failed(rows) == {}
        passed = by_outcome(rows, Outcome.PASS)
        assert [name for name in passed if name.startswith("cancel")] and len(passed) > 20
    else:
        assert "cancel: a cancelled stream frees its blocks" in failed(rows)


def test_handoffs_that_a_model_does_not_claim_are_tried() -> None:
    """Where they fail, replicas run every prompt themselves; a model that claims them fails the checks."""

    class NoWorld(FakeServer):
        def begin_send(self, handoff_id: int) -> list[int] | None:
            return None

    def unclaimed(server: FakeServer) -> None:
        del server.parameters["release_handoff"]

    rows, _ = run(NoWorld, changed=unclaimed, pair=NoWorld)
    assert failed(rows) == {}
    lacking = [row.verdict.why for row in rows if row.verdict.why.startswith("handoffs between these")]
    assert len(lacking) == 4 and all("; fallback: decode runs every prompt" in why for why in lacking)
    rows, _ = run(NoWorld, pair=NoWorld)
    assert len([name for name in failed(rows) if name.startswith("disaggregated")]) == 4


class EndsReports(FakeServer):
    """Load reports end at the first context_only call, which is behind the checks of cancels."""

    has_ended = False

    def take(self, stream: Stream) -> None:
        self.has_ended = self.has_ended or stream.parameters.get("request_type") == "context_only"
        super().take(stream)

    def report(self, stream: Stream) -> None:
        if not self.has_ended:
            super().report(stream)


def test_old_load_reports_prove_nothing() -> None:
    """A check behind the last report is not judged."""
    rows, _ = run(EndsReports, pair=EndsReports)
    assert failed(rows) == {}
    assert "cancel: a cancelled stream frees its blocks" in by_outcome(rows, Outcome.PASS)
    assert [row.capability for row in rows if row.verdict.why.startswith("no load report came")]


def test_a_second_run_with_one_seed_fails_no_check() -> None:
    """Its prompts are in the cache already, which says nothing about the engine."""

    async def work() -> list[Row]:
        engine = FakeServer("a:1")
        settings = Settings(cancels=1, seed=3)
        for _ in range(2):
            async with opened_trial(Target(client=engine, sizes={}), settings) as trial:
                rows = await run_checks(trial, all_checks(1), lambda check, row: None)
        await asyncio.sleep(SETTLE_S)
        return rows

    rows = simulate(work())
    assert failed(rows) == {}
    seen = [row.capability for row in rows if row.verdict.why.endswith("had the same --seed")]
    assert seen == ["reuse", "kv_events", "kv_events"]
