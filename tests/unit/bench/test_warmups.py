"""The bench of warming up: the integral of the loss and its end, first tokens, arms, records, page and plot."""

from __future__ import annotations

import asyncio
import json
import random
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import typer
from typer.testing import CliRunner

import bench.warmups.__main__ as command
from bench import control, generation
from bench.generate_only import GenerateOnly
from bench.pages import NOTES
from bench.results import BenchError
from bench.run_records import RecordError
from bench.warmups import conversing, first_tokens, page, plot, recovery, running
from bench.warmups.arms import ARMS, REPLICAS, SETTINGS, Load, planned, tables
from bench.warmups.conversing import read
from bench.warmups.first_tokens import Call, bucket_of, compare
from bench.warmups.lease_states import LeaseState, LeaseStates, durations_s
from bench.warmups.records import BEFORE_S, Record, Records
from bench.warmups.recovery import BIN_S, OPENING_S, STABLE_S, TOLERANCE
from bench.warmups.running import Made, Observed, Times, record_of
from kvmesh import config
from kvmesh.config import ConfigError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.patience import patience

WIDTH = round(STABLE_S / BIN_S)
STEADY = 1000
"""Tokens per bin of a steady pool."""
TIMES = Times(steady_from_s=100.0, killed_s=120.0, started_s=130.0, ready_s=132.5, ended_s=200.0)
MADE = Made(150.0, commit="abc1234", cpu="Test, 2 cores")
STATES = (LeaseState("starting", 0.1), LeaseState("warming", 0.5), LeaseState("serving", 3.0))


def call(first_s: float, *, uncached: int = 60, ttft_s: float = 0.1, where: str = "prefill-0") -> Call:
    """Return a good call with its first token at `first_s`."""
    return Call(first_s - ttft_s, first_s, first_s + 0.2, 600, 600 - uncached, 8, where, "decode-0", 0.05, "")


def bins_of(lost_bins: int) -> dict[int, int]:
    """Return goodput of which half is missing in `lost_bins` bins since the engine was ready."""
    ready = round(TIMES.ready_s / BIN_S)
    bins = dict.fromkeys(range(round(90 / BIN_S), round(TIMES.ended_s / BIN_S)), STEADY)
    return bins | dict.fromkeys(range(ready, ready + lost_bins), STEADY // 2)


def made_record(setting: str, arm: str, repeat: int, lost_s: float) -> Record:
    """Return the record of a run that lost one of two replicas for `lost_s`."""
    calls = [call(at / 10) for at in range(1001, 1990)]
    calls += [call(133 + at / 10, where="prefill-1", ttft_s=0.11) for at in range(60)]
    bins = bins_of(round(lost_s / BIN_S))
    seen = Observed(TIMES, bins, 60.0, () if arm == "none" else STATES)
    return record_of(SETTINGS[setting], arm, repeat, seen, sorted(calls), MADE)


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_is_the_area_below_steady(seed: int) -> None:
    """A pool of two that loses one replica for n seconds loses n replica-seconds, however the loss is spread."""
    rng = random.Random(seed)
    found = [rng.uniform(0.0, 1.2) for _ in range(rng.randrange(1, 200))]
    expected = 2 * BIN_S * (len(found) - sum(found))
    assert recovery.lost_replica_s(found, 2) == pytest.approx(expected)
    assert recovery.lost_replica_s([0.5] * 40, 2) == pytest.approx(10.0)
    assert recovery.lost_replica_s([], 2) == 0.0


@pytest.mark.parametrize("seed", range(30))
def test_the_loss_ends_at_the_first_stable_window(seed: int) -> None:
    """No earlier window has its mean and the mean of its opening within the tolerance, and the found one has both."""
    rng = random.Random(seed)
    found = [rng.choice((0.5, 0.97, 1.0, 1.02)) for _ in range(rng.randrange(0, 60))]
    found += [rng.uniform(0.96, 1.02) for _ in range(rng.randrange(0, 2 * WIDTH))]
    end = recovery.recovered_at(found)
    means = [sum(found[at : at + WIDTH]) / WIDTH for at in range(len(found) - WIDTH + 1)]
    opening = round(OPENING_S / BIN_S)
    good = [
        at
        for at, mean in enumerate(means)
        if min(mean, sum(found[at : at + opening]) / opening) >= 1.0 - TOLERANCE
    ]
    assert end == (good[0] if good else None), f"seed={seed}"


def test_a_window_must_be_whole() -> None:
    """A pool that is steady for less than the window has not recovered yet."""
    assert recovery.recovered_at([1.0] * (WIDTH - 1)) is None
    assert recovery.recovered_at([1.0] * WIDTH) == 0
    assert recovery.recovered_at([0.0] * 7 + [0.98] * WIDTH) == 7


def test_a_later_backlog_does_not_make_up_for_a_loss() -> None:
    """The mean over the window alone would end this loss at its begin."""
    lost = round(OPENING_S / BIN_S)
    assert recovery.recovered_at([0.5] * lost + [1.2] * WIDTH) in range(lost // 2, lost)


def test_rates_and_shares_take_whole_bins() -> None:
    """A bin that is cut by the begin or the end of a window does not count; an empty bin counts as 0."""
    bins = {4: 100, 5: 100, 7: 100, 8: 999}
    assert recovery.rate_per_s(bins, 0.9, 2.1) == pytest.approx(300 / 1.0)
    assert recovery.shares(bins, 0.9, 2.1, 400.0) == [1.0, 1.0, 0.0, 1.0]
    with pytest.raises(BenchError, match=r"no bin of 0\.25 s"):
        recovery.rate_per_s(bins, 1.01, 1.24)
    with pytest.raises(BenchError, match="steady rate is 0"):
        recovery.shares(bins, 0.0, 2.0, 0.0)


def test_the_saved_share_has_an_interval_over_repeats() -> None:
    """Equal repeats have no spread; the interval holds the share, and is the same for the same seed."""
    assert recovery.saved([20.0] * 5, [5.0] * 5) == (0.75, 0.75, 0.75)
    none, arm = [18.0, 20.0, 22.0, 19.0, 21.0], [4.0, 6.0, 5.0, 3.0, 7.0]
    share, low, high = recovery.saved(none, arm)
    assert share == pytest.approx(0.75) and low < share < high
    assert 0.60 < low < 0.73 and 0.77 < high < 0.86
    assert recovery.saved(none, arm) == (share, low, high)
    assert recovery.saved([10.0], [15.0])[0] == -0.5
    for base, other in (([], [1.0]), ([1.0], []), ([-1.0], [1.0])):
        with pytest.raises(BenchError, match="a saved share needs"):
            recovery.saved(base, other)


def test_smoothing_keeps_the_length_and_the_mean_of_a_constant() -> None:
    """The ends have narrower windows."""
    assert recovery.smoothed([1.0, 1.0, 4.0, 1.0, 1.0], 3) == [1.0, 2.0, 2.0, 2.0, 1.0]
    assert recovery.smoothed([], 5) == []


def test_first_tokens_are_compared_within_buckets() -> None:
    """Equal TTFT at equal sizes has the ratio 1, although the mix of sizes differs from the steady one."""
    steady = [call(at, uncached=40, ttft_s=0.1) for at in range(200)]
    steady += [call(at, uncached=500, ttft_s=0.6) for at in range(20)]
    first = [call(at, uncached=500, ttft_s=0.6) for at in range(60)]
    found = compare(steady, first, 0.001)
    assert (found.requests, found.borrowed, found.ratio) == (first_tokens.FIRST, 0, 1.0)
    slower = compare(steady, [one._replace(first_s=one.sent_s + 1.2) for one in first], 0.001)
    assert slower.ratio == pytest.approx(2.0)


def test_a_bucket_without_steady_requests_borrows_and_adds_the_engines_cost() -> None:
    """A steady request of 40 tokens that took 0.1 s stands for one of 640 with 0.6 s more."""
    steady = [call(at, uncached=40, ttft_s=0.1) for at in range(200)]
    steady += [call(at, uncached=640, ttft_s=9.0) for at in range(first_tokens.SAMPLES_MIN - 1)]
    found = compare(steady, [call(1.0, uncached=640, ttft_s=0.7)], 0.001)
    assert found.borrowed == 1 and found.ratio == pytest.approx(1.0)


def test_nothing_to_compare_is_an_error() -> None:
    """A replica that was never used, or a steady state without requests, has no ratio."""
    with pytest.raises(BenchError, match="0 first requests and 1 buckets"):
        compare([call(at) for at in range(50)], [], 0.001)
    with pytest.raises(BenchError, match="1 first requests and 0 buckets"):
        compare([], [call(1.0)], 0.001)


def test_buckets_ascend_and_the_last_one_is_open() -> None:
    """An upper end is exclusive."""
    assert [bucket_of(tokens) for tokens in (0, 31, 32, 1023, 1024, 10**6)] == [0, 0, 1, 9, 10, 10]


def test_the_record_of_a_run_is_what_was_put_into_it() -> None:
    """Half of the pool is missing for 12 s: 12 replica-seconds, over 12 s after the engine was ready."""
    record = made_record("b", "none", 2, 12.0)
    assert record.steady_per_s == STEADY / BIN_S and record.boot_s == 2.5
    assert record.end_s is not None and record.end_s <= 12.0
    # The window may hold 2 % of its length of loss: the tolerance.
    assert record.lost_replica_s == pytest.approx(12.0, abs=2 * TOLERANCE * STABLE_S)
    assert record.first_use_s == pytest.approx(0.5) and record.first_requests == first_tokens.FIRST
    assert record.ttft_ratio == pytest.approx(1.1)
    assert record.cached_share == pytest.approx(0.9) and record.errors == 0 and not record.problems
    assert len(record.series) == BEFORE_S + 67 and record.series[BEFORE_S] == 0.5
    assert (record.queue_alone_s, record.queue_steady_s) == (0.05, 0.05)


def test_a_loss_that_does_not_end_is_integrated_to_the_cap() -> None:
    """The record says that there is no end."""
    record = made_record("b", "none", 1, 60.0)
    assert record.end_s is None and record.lost_replica_s == pytest.approx(60.0)


def test_errors_count_from_the_time_at_which_the_engine_is_ready() -> None:
    """A failed call before is the kill's; a decode setting looks at decode replicas and finds none here."""
    bad = call(110.0)._replace(first_s=None, error="UNAVAILABLE")
    calls = [call(at / 10) for at in range(1001, 1990)] + [bad, bad._replace(ended_s=140.0)]
    seen = Observed(TIMES, bins_of(0), 60.0)
    record = record_of(SETTINGS["decode-b"], "none", 1, seen, sorted(calls, key=str), MADE)
    assert record.errors == 1 and record.first_use_s is None and record.ttft_ratio is None
    assert record.problems == ("0 first requests and 1 buckets of steady ones: none to compare",)
    assert record.lost_replica_s == 0.0 and record.end_s == 0.0


def test_every_setting_without_warm_up_is_a_valid_mesh() -> None:
    """Two replicas of the role under test, one of the other; goodput of decode counts output tokens."""
    for setting in SETTINGS.values():
        made = config.build(tables(setting, "none", "redis://127.0.0.1:1/0"))
        counts = {"prefill": made.prefill.replicas, "decode": made.decode.replicas}
        assert counts[setting.role] == REPLICAS and sum(counts.values()) == REPLICAS + 1
        assert made.control.replicas == 0 and setting.counts_output == (setting.role == "decode")
        assert bool(setting.cold) == setting.name.endswith("a")
        longest = setting.load.system_tokens + setting.load.turns_spread[1] * (
            setting.load.message_tokens + setting.load.output_tokens
        )
        assert longest <= made.engine.max_sequence_tokens


def test_arms_take_turns_in_each_repeat() -> None:
    """A repeat has each arm once; every second one in reverse."""
    runs = [(setting.name, arm, repeat) for setting, arm, repeat in planned(["b", "a"], ARMS, 3)]
    assert len(runs) == len(set(runs)) == 3 * 2 * len(ARMS)
    assert [arm for _, arm, _ in runs[: len(ARMS)]] == list(ARMS)
    assert runs[8:10] == [("b", "replay", 2), ("b", "pull", 2)]


def test_records_continue_where_they_stopped(tmp_path: Path) -> None:
    """A line that was cut off is dropped, and its run is made again."""
    records = Records(tmp_path / "deep" / "runs.jsonl")
    made = [made_record("b", arm, 1, 10.0) for arm in ("none", "pull")]
    for record in made:
        records.append(record)
    with records.path.open("ab") as file:
        file.write(b'{"setting": "b", "arm')
    assert records.read() == made
    left = records.missing(planned(["b"], ["none", "pull"], 2))
    assert [(arm, repeat) for _, arm, repeat in left] == [("pull", 2), ("none", 2)]
    records.append(made_record("b", "pull", 2, 1.0))
    assert len(records.read()) == 3
    records.path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(RecordError, match="line 1"):
        records.read()


def recorded() -> list[Record]:
    """Return two repeats of three arms in two settings."""
    losses = {"none": 20.0, "shapes": 16.0, "pull": 4.0}
    return [
        made_record(setting, arm, repeat, lost_s + repeat)
        for setting in ("a", "b")
        for arm, lost_s in losses.items()
        for repeat in (1, 2)
    ]


def test_the_verdict_of_an_arm_is_its_saved_share() -> None:
    """Shapes alone miss the aim, and pulls meet it; without warm-up there is nothing to judge."""
    found = page.verdicts(recorded())
    assert list(found) == ["a", "b"] and list(found["b"]) == ["none", "shapes", "pull"]
    assert found["b"]["none"]["saved"] is None and found["b"]["none"]["lost_replica_s"] == pytest.approx(
        21.5, abs=1.2
    )
    assert found["b"]["shapes"]["saved"] < page.SAVED_MIN < found["b"]["pull"]["saved_low"]
    assert found["b"]["pull"]["ttft_ratio"] == pytest.approx(1.1)
    only = page.verdicts([one for one in recorded() if one.arm == "pull"])
    assert only["b"]["pull"]["saved"] is None


def test_all_engines_at_once_lose_no_more_than_without_a_warm_up() -> None:
    """No replica is left, so there is nothing to save: the aim of that setting is 0 %."""
    setting = SETTINGS["all-a"]
    assert setting.is_all and setting.replicas == ("prefill-0", "prefill-1")
    assert SETTINGS["a"].replicas == ("prefill-1",) and not SETTINGS["a"].is_all
    records = [
        replace_record(each, setting="all-a", lost_replica_s=lost)
        for each in recorded()[:1]
        for lost in (20.0,)
    ]
    records += [replace_record(records[0], arm="pull", lost_replica_s=19.0)]
    records += [replace_record(records[0], arm="replay", lost_replica_s=25.0)]
    text = "\n".join(page.lines(records, "make warmups", {"date": "today"}))
    assert "| 0: met |" in text and "| 0: missed |" in text and "All 2 engines are killed at once" in text


def test_a_decode_is_also_judged_by_the_time_per_output_token() -> None:
    """A cold step of 2 s in one answer of eight tokens is 0.3 s for each. A failed answer has no time per token."""
    steady = [call(at / 10)._replace(decode="decode-0") for at in range(1001, 1190)]
    fresh = [call(133 + at / 10)._replace(decode="decode-1") for at in range(50)]
    slow = [each._replace(ended_s=each.ended_s + 2.1) for each in fresh[:5]]
    bad = [each._replace(ended_s=each.ended_s + 60.0, error="UNAVAILABLE") for each in fresh[:5]]
    steady += [
        each._replace(ended_s=TIMES.killed_s + 9.0) for each in steady[-30:]
    ]  # they wait for a takeover
    seen = Observed(TIMES, bins_of(0), 60.0, STATES)
    for calls, p95_s in (([*fresh[5:], *slow], 2.3 / 7), ([*fresh[5:], *bad], 0.2 / 7)):
        record = record_of(SETTINGS["decode-a"], "none", 1, seen, sorted([*steady, *calls]), MADE)
        assert record.steady_tpot_p95_s == pytest.approx(0.2 / 7)
        assert record.tpot_p95_s == pytest.approx(p95_s)
        assert record.tpot_ratio == pytest.approx(p95_s / (0.2 / 7))
        text = "\n".join(page.page([record], "make warmups", {"date": "today"}, "warmup.svg"))
        told = f"- p95 time per output token of the first 50, none: {1000 * p95_s:.0f} ms, "
        assert f"{told}{record.tpot_ratio:.2f} x steady (runs: 1)." in text
        assert "- Time in each state, none: starting 0.4 s, warming 2.5 s.\n- p95" in text
    assert made_record("b", "none", 1, 12.0).tpot_p95_s is None


def test_the_page_shows_each_arm_and_the_doubts() -> None:
    """An aim that is missed says so; a run that did not end, too."""
    late = replace_record(recorded()[0], end_s=None, problems=("the client stalled for 3.0 s",))
    text = "\n".join(page.page([late, *recorded()[1:]], "make warmups", {"date": "today"}, "warmup.svg"))
    assert "![Goodput of the pool" in text and "(warmup.svg)" in text
    assert "| b | shapes + pull |" in text and "| 55: met |" in text and "| 55: missed |" in text
    assert "Time in each state, shapes + pull: starting 0.4 s, warming 2.5 s." in text
    assert "state, none" not in text
    assert ", 1 not |" in text and "the client stalled for 3.0 s." in text
    assert "## Setting a: prefill, cold shapes" in text and "--cold-s 2 --cold-runs 2" in text
    assert "decode" not in text.partition("## Aims")[2]
    assert "lost 2" in page.summary(late) and "not ended" in page.summary(late)


def replace_record(record: Record, **changes: object) -> Record:
    """Return a record with other values."""
    return msgspec.structs.replace(record, **changes)


def test_the_plot_has_a_line_per_arm_and_setting() -> None:
    """It is well-formed, equal for equal records, and later than the end of a short run the others count."""
    found = recorded()
    picture = plot.svg(found)
    assert picture == plot.svg(found)
    lines = [each for each in ET.fromstring(picture).iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2 * 3
    short = replace_record(found[0], series=found[0].series[:30])
    assert len(plot.median_line([short, found[1]])) == len(found[1].series)
    ET.fromstring(plot.svg([]))


def test_the_command_writes_page_record_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with a record are not made again; a run that fails is tried again; hand-written notes stay."""
    results, written = tmp_path / "runs.jsonl", tmp_path / "warmup.md"
    tried: list[tuple[str, str, int]] = []

    def perform(setting: object, arm: str, repeat: int, *_: object) -> Record:
        tried.append((SETTINGS["b"].name, arm, repeat))
        if len(tried) == 1:
            raise BenchError("prefill-1 ended: nothing was logged")
        return made_record("b", arm, repeat, 5.0)

    monkeypatch.setattr(running, "perform", perform)
    Records(results).append(made_record("b", "none", 1, 20.0))
    app = typer.Typer()
    app.command()(command.warmups)
    words = ["--arms", "none,pull", "--settings", "b", "--repeats", "1", "--resume", "--json"]
    words += ["--results", str(results), "--write", str(written)]
    written.write_text(f"# Warm-up\n{NOTES}\n\nBy hand.\n", encoding="utf-8")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert tried == [("b", "pull", 1)] * 2
    told = json.loads(written.with_suffix(".json").read_text(encoding="utf-8"))
    assert [run["arm"] for run in told["runs"]] == ["none", "pull"]
    assert told["verdicts"]["b"]["pull"]["saved"] > page.SAVED_MIN
    assert json.loads(done.stdout) == told
    assert written.read_text(encoding="utf-8").endswith("By hand.\n")
    assert written.with_suffix(".svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_wrong_name_or_configuration_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says the allowed names, or the key that is wrong."""
    app = typer.Typer()
    app.command()(command.warmups)
    done = CliRunner().invoke(app, ["--arms", "non"])
    assert done.exit_code == 2 and "'non' is unknown" in done.output and "--arms" in done.output

    def perform(*_: object) -> Record:
        raise ConfigError("Unknown section [warm_up].")

    monkeypatch.setattr(running, "perform", perform)
    words = ["--arms", "pull", "--settings", "b", "--results", str(tmp_path / "runs.jsonl")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "Unknown section [warm_up]." in done.output


def test_the_clients_lines_are_read_in_the_order_of_sending(tmp_path: Path) -> None:
    """The file has the order of the ends."""
    file = tmp_path / "calls.jsonl"
    made = [call(3.0), call(1.0), call(2.0)._replace(first_s=None, error="UNAVAILABLE")]
    file.write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")
    assert read(file) == [made[1], made[2], made[0]]


def test_a_state_lasts_until_the_next_one() -> None:
    """The last state has no end; a state that comes again adds up; the life before the restart does not count."""
    again = (*STATES, LeaseState("starting", 5.0), LeaseState("serving", 5.5))
    assert durations_s(STATES) == pytest.approx({"starting": 0.4, "warming": 2.5})
    assert durations_s(again) == pytest.approx({"starting": 0.9, "warming": 2.5, "serving": 2.0})
    assert durations_s((LeaseState("serving", 0.0), *STATES)) == durations_s(STATES)
    assert durations_s(()) == durations_s(STATES[:1]) == durations_s(STATES[2:]) == {}


def test_without_redis_no_state_is_seen() -> None:
    """The measurement goes on: an unknown state is no state."""
    with LeaseStates("redis://127.0.0.1:1/0", "kvmesh", "prefill-1") as leases:
        leases.poll(0.5)
        assert leases.seen == []


class Frontend(GenerateOnly):
    """Answers with fixed tokens; every third call fails."""

    def __init__(self, enough: int) -> None:
        self.prompts: list[tuple[str, tuple[int, ...]]] = []
        self.failed: set[int] = set()
        self.is_enough = asyncio.Event()
        self._enough = enough

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Answer one call."""
        self.prompts.append((request.session_id, tuple(request.tokens.ids)))
        number = len(self.prompts)
        if number >= self._enough:
            self.is_enough.set()
        if number % 3 == 0:
            self.failed.add(number - 1)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no replica")
        yield pb.GenerateResponse(tokens=pb.Tokens(ids=[7] * 4))
        yield pb.GenerateResponse(tokens=pb.Tokens(ids=[8] * 4))
        attempt = pb.AttemptExplanation(prefill_replica="prefill-1", decode_replica="decode-0")
        usage = pb.Usage(cached_token_count=16)
        finished = pb.Finished(usage=usage, explanation=pb.Explanation(attempts=[attempt]))
        yield pb.GenerateResponse(finished=finished)


async def test_clients_converse_in_a_closed_loop_and_send_failed_turns_again(tmp_path: Path) -> None:
    """Each turn has the whole conversation before it; goodput counts prompts at first tokens, and output as it comes."""
    load = Load(clients=3, pause_s=0.0, output_tokens=8, turns=3, system_tokens=5, message_tokens=2)
    frontend, server = Frontend(enough=40), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(frontend, server)
    path = tmp_path / "calls.jsonl"
    async with control.serving(server) as address, generation.channel(address) as stub:
        with path.open("w", encoding="utf-8") as file:
            client = conversing.Client(stub, load, file, seed=1)
            running_loop = asyncio.create_task(client.run())
            async with patience(20.0):
                await frontend.is_enough.wait()
                client.stop()
                await running_loop
    calls = read(path)
    good = [one for one in calls if not one.error]
    assert client.calls == len(calls) == len(frontend.prompts)
    assert {one.error for one in calls} == {"", "UNAVAILABLE"}
    assert sum(client.prompt.values()) == sum(one.prompt_tokens for one in good)
    assert sum(client.output.values()) == 8 * len(good)
    assert {(one.prefill, one.decode, one.cached_tokens) for one in good} == {("prefill-1", "decode-0", 16)}
    sessions: dict[str, list[tuple[int, ...]]] = {}
    for session, prompt in frontend.prompts:
        assert len(prompt) in (7, 17, 27)
        if session in sessions:
            before = sessions[session][-1]
            answered = before + (7,) * 4 + (8,) * 4
            assert prompt == before or prompt[:-2] == answered
        sessions.setdefault(session, []).append(prompt)
    assert {prompts[0][:5] for prompts in sessions.values()} == {frontend.prompts[0][1][:5]}
    assert sorted(len(prompts[0]) for name, prompts in sessions.items() if name.endswith("-0")) == [7, 17, 27]
