"""The page docs/measurements/warmup.md and its record. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bench import pages
from bench.results import BenchError
from bench.warmups import first_tokens, recovery
from bench.warmups.arms import (
    ARM_TITLES,
    ARMS,
    BATCH_MAX,
    NONE,
    REPLICAS,
    SETTINGS,
    STEP_TOKENS_MAX,
    Pace,
    Setting,
)
from bench.warmups.lease_states import durations_s
from bench.warmups.records import Record

SAVED_MIN: Final = 0.55
SAVED_MOONSHOT: Final = 0.80
TTFT_RATIO_MAX: Final = 1.2

HEAD: Final = (
    *("warm-up", "runs", "steady, tokens/s", "lost, replica-s", "saved, %", "loss ended after, s"),
    *("first use after, s", "p95 TTFT of the first 50, ms", "over steady", "queue of one alone, s", "errors"),
)
AIM_HEAD: Final = (
    "setting",
    "warm-up",
    "saved, % (95 % interval)",
    "aim",
    "p95 TTFT over steady",
    "aim: 1.2",
)


def page(records: Sequence[Record], command: str, machine: Mapping[str, str], picture: str) -> list[str]:
    """Return the page's lines. `picture`: name of the plot's file."""
    told = [f"![Goodput of the pool after a restart, by way of warming up]({picture})", ""]
    return ["# Warm-up", "", *told, *lines(records, command, machine)]


def lines(records: Sequence[Record], command: str, machine: Mapping[str, str]) -> list[str]:
    """Return the page's lines behind its picture."""
    made = [*pages.paragraph(_about(records, command, machine)), "", *pages.paragraph(_PROCEDURE), ""]
    made += [*pages.paragraph(_ENDS), "", *pages.paragraph(_TTFT), "", *pages.paragraph(_TPOT), ""]
    made += pages.section("Aims", pages.table(AIM_HEAD, _aims(records), "llrlrl"))
    for setting in SETTINGS.values():
        chosen = [each for each in records if each.setting == setting.name]
        if chosen:
            head = f"Setting {setting.name}: {setting.title}"
            body = [*pages.paragraph(_setting(setting, chosen)), "", *table(chosen)]
            if facts := [*_states(chosen), *_output_pace(chosen)]:
                body += ["", *pages.items(facts)]
            made += pages.section(head, body)
    return made + pages.section("Doubts", _doubts(records))


def table(records: Sequence[Record]) -> list[str]:
    """Return one row per arm of the runs of one setting."""
    by_arm = {arm: [each for each in records if each.arm == arm] for arm in ARMS}
    return pages.table(HEAD, [_row(arm, by_arm) for arm in ARMS if by_arm[arm]], "lr")


def verdicts(records: Sequence[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return saved share, its interval and the ratio of TTFT, by setting and arm. An absent figure is None."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for setting in SETTINGS:
        losses = {
            arm: [each.lost_replica_s for each in records if (each.setting, each.arm) == (setting, arm)]
            for arm in ARMS
        }
        for arm in ARMS:
            if losses[arm]:
                ratio = _ratio(each for each in records if (each.setting, each.arm) == (setting, arm))
                found.setdefault(setting, {})[arm] = _verdict(
                    losses[NONE], losses[arm], ratio, is_base=arm == NONE
                )
    return found


def as_json(told: Mapping[str, Any]) -> str:
    """Return the record, with a line per run."""
    runs = ",\n".join(f"  {json.dumps(run)}" for run in told["runs"])
    head = json.dumps({name: value for name, value in told.items() if name != "runs"}, indent=1)
    return f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'


def summary(record: Record) -> str:
    """Return one run in one line."""
    ended = "not ended" if record.end_s is None else f"ended after {record.end_s:.1f} s"
    used = "never used" if record.first_use_s is None else f"used after {record.first_use_s:.1f} s"
    told = [
        f"lost {record.lost_replica_s:.1f} replica-s, {ended}, {used}",
        f"steady {record.steady_per_s:.0f} tokens/s, {100 * record.cached_share:.0f} % cached",
        f"cores {record.busy_percent:.0f} % busy",
    ]
    if record.ttft_ratio is not None:
        told.append(f"p95 TTFT of the first {record.first_requests}: {record.ttft_ratio:.2f} x steady")
    if record.queue_alone_s is not None and record.queue_steady_s is not None:
        told.append(f"queue {record.queue_steady_s:.2f} s, of one alone {record.queue_alone_s:.2f} s")
    told.append(f"{record.errors} errors of {record.requests} calls, {record.took_s:.0f} s")
    return "; ".join([*told, *record.problems])


def _verdict(
    none: Sequence[float], arm: Sequence[float], ratio: float | None, *, is_base: bool
) -> dict[str, Any]:
    verdict: dict[str, Any] = {
        "runs": len(arm),
        "lost_replica_s": statistics.median(arm),
        "saved": None,
        "saved_low": None,
        "saved_high": None,
        "ttft_ratio": ratio,
    }
    if is_base:
        return verdict
    try:
        share, low, high = recovery.saved(none, arm)
    except BenchError:
        return verdict
    return verdict | {"saved": share, "saved_low": low, "saved_high": high}


def _aims(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return [
        (setting, ARM_TITLES[arm], *_judged(SETTINGS[setting], told))
        for setting, by_arm in verdicts(records).items()
        for arm, told in by_arm.items()
        if arm != NONE
    ]


def _judged(setting: Setting, told: Mapping[str, Any]) -> tuple[str, ...]:
    least = 0.0 if setting.is_all else SAVED_MIN
    saved, ratio = told["saved"], told["ttft_ratio"]
    share = (
        "-"
        if saved is None
        else f"{100 * saved:.0f} ({100 * told['saved_low']:.0f} to {100 * told['saved_high']:.0f})"
    )
    return (
        share,
        "-" if saved is None else f"{100 * least:g}: {_met(saved >= least)}",
        "-" if ratio is None else f"{ratio:.2f}",
        "-" if ratio is None else _met(ratio <= TTFT_RATIO_MAX),
    )


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _row(arm: str, by_arm: Mapping[str, Sequence[Record]]) -> tuple[str, ...]:
    records = by_arm[arm]
    late = sum(each.end_s is None for each in records)
    ended = pages.spread((each.end_s for each in records), 1) + (f", {late} not" if late else "")
    base, losses = [each.lost_replica_s for each in by_arm[NONE]], [each.lost_replica_s for each in records]
    told = _verdict(base, losses, None, is_base=arm == NONE)
    return (
        *(ARM_TITLES[arm], str(len(records)), pages.spread((each.steady_per_s for each in records), 0)),
        *(pages.spread(losses, 1), "-" if told["saved"] is None else f"{100 * told['saved']:.0f}", ended),
        pages.spread((each.first_use_s for each in records), 1),
        pages.spread(
            (1000 * each.ttft_p95_s if each.ttft_p95_s is not None else None for each in records), 0
        ),
        pages.spread((each.ttft_ratio for each in records), 2),
        pages.spread((each.queue_alone_s for each in records), 2),
        str(sum(each.errors for each in records)),
    )


def _ratio(records: Iterable[Record]) -> float | None:
    known = [each.ttft_ratio for each in records if each.ttft_ratio is not None]
    return statistics.median(known) if known else None


def _about(records: Sequence[Record], command: str, machine: Mapping[str, str]) -> str:
    commits = ", ".join(sorted({each.commit for each in records}))
    cpus = ", ".join(sorted({each.cpu for each in records}))
    minutes = sum(each.took_s for each in records) / 60
    return (
        f"Written by `{command}`, {machine['date']}. Commits: {commits}. Processors: {cpus}. "
        f"{len(records)} runs, {minutes:.0f} minutes. Cells have the median and the extremes of the runs."
    )


_PROCEDURE: Final = (
    "Each run has a fresh mesh: a frontend, a router, two replicas of the role under test and one of the other. Clients "
    "hold conversations in a closed loop: system prompt, earlier messages, a new message. The load saturates both. One "
    "engine is killed. The other replica takes over its conversations for a while. Then the engine is "
    "started again; its replica keeps running. All other engines are warm. The arms take turns in each repeat. Without "
    "warm-up the mesh has no control process. With one, the load of newer runs begins once all replicas are proved "
    "(notes): golden prompts beside the load would lower the steady goodput."
)

_ENDS: Final = (
    f"Lost capacity is the integral of (1 - goodput / steady goodput) x {REPLICAS} replicas. It begins when the engine is "
    f"ready, so the time of the warm-up counts. It ends at the first window of {recovery.STABLE_S:g} s with a mean within "
    f"{100 * recovery.TOLERANCE:g} % of steady, which its first {recovery.OPENING_S:g} s must reach, too. The "
    f"latest end is {Pace().after_s_max:g} s after the begin. Goodput above steady makes the loss smaller. Goodput "
    "counts the prompt tokens of requests at their first token, cached ones included. At decode it counts output tokens. "
    "`saved` is 1 - mean loss / mean loss without warm-up. Its interval is a percentile bootstrap over the repeats."
)

_TTFT: Final = (
    f"The first {first_tokens.FIRST} requests at the fresh replica are compared with steady ones in the same buckets of "
    "uncached prompt tokens. A bucket with too few steady requests borrows those of the nearest bucket that has enough, "
    "plus the engine's cost of the difference in size."
)


_TPOT: Final = (
    "The time per output token (TPOT) of a request is the time from its first token to its end, over its other tokens. "
    "Steady requests that ended before the kill are compared, without buckets. A decode beside a prefill is not seeded: "
    "there all arms with warm-up do the same."
)


def _setting(setting: Setting, records: Sequence[Record]) -> str:
    load, engine = setting.load, setting.engine
    cold = f"Engine options when started again: `{' '.join(setting.cold)}`. " if setting.cold else ""
    down = f"The engine is down for {setting.down_s:g} s. "
    if setting.is_all:
        down = (
            f"All {setting.restarted} engines are killed at once, and down for {setting.down_s:g} s. The loss begins when "
            "all of them are ready. "
        )
    shapes = f"A step has up to {STEP_TOKENS_MAX} rows, so there are {STEP_TOKENS_MAX.bit_length()} shapes"
    if setting.counts_output:
        shapes = (
            f"A batch has up to {BATCH_MAX} rows, so there are {BATCH_MAX.bit_length()} shapes of batches"
        )
    cached = pages.spread((100 * each.cached_share for each in records), 0)
    busy = pages.spread((each.busy_percent for each in records), 0)
    return (
        f"{down}{load.clients} clients with conversations of {load.turns} turns on average: {load.message_tokens} new "
        f"tokens a turn, {load.output_tokens} output tokens, pauses of {load.pause_s:g} s on average. {cached} % of the "
        f"prompt tokens are cached in steady state. Costs: {1000 * setting.token_s:g} ms per uncached token, "
        f"{1000 * engine['block_transfer_s']:g} ms per KV block moved. {cold}{shapes}. "
        f"The cores are {busy} % busy."
    )


def _states(records: Sequence[Record]) -> list[str]:
    """Return a sentence per arm: the median time in each state of the lives of the replicas."""
    told = []
    for arm in ARMS:
        found = [
            durations_s(states)
            for each in records
            if each.arm == arm
            for states in (each.states, *each.other_states)
        ]
        names = dict.fromkeys(name for each in found for name in each)
        if names:
            spent = (f"{name} {pages.spread((each.get(name) for each in found), 1)} s" for name in names)
            told.append(f"Time in each state, {ARM_TITLES[arm]}: {', '.join(spent)}.")
    return told


def _output_pace(records: Sequence[Record]) -> list[str]:
    """Return a sentence per arm: the time per output token of its first requests. Empty: a prefill makes no output."""
    told = []
    for arm in ARMS:
        found = [each for each in records if each.arm == arm and each.tpot_p95_s is not None]
        if found:
            p95 = pages.spread((1000 * (each.tpot_p95_s or 0.0) for each in found), 0)
            ratio = pages.spread((each.tpot_ratio for each in found), 2)
            what = f"p95 time per output token of the first {first_tokens.FIRST}, {ARM_TITLES[arm]}"
            told.append(f"{what}: {p95} ms, {ratio} x steady (runs: {len(found)}).")
    return told


def _doubts(records: Sequence[Record]) -> list[str]:
    return pages.items(
        f"Setting {each.setting}, {ARM_TITLES[each.arm]}, repeat {each.repeat}: {problem}."
        for each in records
        for problem in each.problems
    )
