"""The aims of a game day, judged from the bins and the views of a run. Pure.

A judge without anything to judge misses its aim: a run without requests proves nothing.
"""

from __future__ import annotations

from typing import Final

from tests.gameday.bins import Window
from tests.gameday.calls import BARE, CUT, FAILED, GOOD, REFUSED, WRONG
from tests.gameday.records import Record
from tests.gameday.shapes import BATCH, PINNED, USERS
from tests.gameday.verdicts import (
    FREE,
    NOTHING,
    SETTLE_S,
    Judge,
    Verdict,
    at_least,
    fault,
    steady,
    whole,
    with_open,
)

TTFT_FACTOR: Final = 1.5
TTFT_BACK_S: Final = 60.0
TTFT_WINDOW_S: Final = 15.0
TTFT_STEP_S: Final = 2.5
AMPLIFICATION_MAX: Final = 1.1
GOODPUT_MIN: Final = 0.9
SERVED_MIN: Final = 0.95
"""The same of the load, where the survivors can carry all of it: three regions at 60 % offer 0.9 of what two can do."""

ERRORS_UP_MAX: Final = 0.001
HOME_SHARE_MIN: Final = 0.9
"""Share of a region's callers at home from which their sessions are back."""

NO_FAILOVER_MIN: Final = 0.5
"""Share of a region's callers through its own frontends, below which the region has failed over as a whole."""

BACK_WINDOW_S: Final = 15.0


def good_after_5_s(record: Record) -> Verdict:
    """Judge new requests of callers that any region may serve, of all regions."""
    return at_least(
        "new requests after 5 s: at least 99.5 % good", fault(record, SETTLE_S, kinds=FREE), 0.995
    )


def streams_exact(record: Record) -> Verdict:
    """Judge that every stream that had tokens ended with all of them, and that some streams had to resume."""
    window = with_open(record, kinds=FREE)
    cut, wrong, resumes = window.count(CUT), window.count(WRONG), window.total("resumes")
    measured = f"{cut} lost, {wrong} with wrong tokens, {resumes} resumed"
    return Verdict("every stream resumed token-exact", measured, resumes > 0 and cut == wrong == 0)


def ttft_back(record: Record) -> Verdict:
    """Judge from when on p95 TTFT is within TTFT_FACTOR times that before the event."""
    aim = f"p95 TTFT within {TTFT_FACTOR:g}x in {TTFT_BACK_S:g} s"
    before_ms = steady(record, kinds=FREE).ttft_ms()
    if before_ms is None:
        return Verdict(aim, NOTHING, is_met=False)
    found = ttft_back_s(record, before_ms)
    when = f"not within {TTFT_BACK_S:g} s" if found is None else f"after {found:g} s"
    return Verdict(aim, f"{when}; {before_ms:.0f} ms before{_by_home(record, before_ms)}", found is not None)


def ttft_back_s(record: Record, before_ms: float) -> float | None:
    """Return the time from which on p95 TTFT is within the factor, as of each later time in TTFT_BACK_S; None: never.

    The p95 of a time is that of all requests from it to the healing. A window of TTFT_WINDOW_S has a hundred of them, too
    few for a p95 that decides. All callers count; those of the dead region come one class below the others.
    """
    found, at_s = None, 0.0
    while at_s <= min(TTFT_BACK_S, record.times.heal_s - TTFT_WINDOW_S):
        value = fault(record, at_s, kinds=FREE).ttft_ms()
        if value is None or value > TTFT_FACTOR * before_ms:
            found = None
        elif found is None:
            found = at_s
        at_s += TTFT_STEP_S
    return found


def _by_home(record: Record, before_ms: float) -> str:
    """Return the factors of p95 TTFT after TTFT_WINDOW_S, of the moved callers and of those of the survivors."""
    moved = fault(record, TTFT_WINDOW_S, kinds=FREE, homes=(record.target,)).ttft_ms()
    own = fault(record, TTFT_WINDOW_S, kinds=FREE, homes=record.survivors).ttft_ms()
    if moved is None or own is None:
        return ""
    return f"; then {moved / before_ms:.1f}x for moved callers, {own / before_ms:.1f}x for the others"


def own_95(record: Record) -> Verdict:
    """Judge the survivors' own callers."""
    window = fault(record, homes=record.survivors, kinds=FREE)
    return at_least("survivors' own callers: at least 95 % good", window, 0.95)


def others_95(record: Record) -> Verdict:
    """Judge the own callers of the regions that are not overloaded."""
    window = fault(record, homes=record.survivors, kinds=FREE)
    return at_least("other regions' own callers: at least 95 % good", window, 0.95)


def typed(record: Record) -> Verdict:
    """Judge that every request that was not good was refused with RetryInfo, from SETTLE_S on."""
    window = fault(record, SETTLE_S)
    refused, others = window.count(REFUSED), window.count(BARE, FAILED, CUT, WRONG)
    measured = f"{refused} refused with RetryInfo, {others} otherwise, of {window.sent}"
    return Verdict(
        "every other answer a typed refusal with RetryInfo", measured, window.sent > 0 and not others
    )


def shed_by_priority(record: Record) -> Verdict:
    """Judge that the lower class is refused first: its refused share is the higher one, if any request is refused."""
    users, batch = (fault(record, SETTLE_S, kinds=(kind,)) for kind in (USERS, BATCH))
    high, low = users.share(REFUSED), batch.share(REFUSED)
    if high is None or low is None:
        return Verdict("shed by priority", NOTHING, is_met=False)
    return Verdict("shed by priority", f"refused: {BATCH} {low:.1%}, {USERS} {high:.1%}", low >= high)


def not_sent_to_dead(record: Record) -> Verdict:
    """Judge that no attempt goes to the dead region once it is known to be dead."""
    window = fault(record, SETTLE_S)
    found = window.by_region("tried")[record.target]
    aim = "no attempt at the dead region after 5 s"
    return Verdict(
        aim, f"{found} of {sum(window.by_region('tried').values())}", window.sent > 0 and not found
    )


def stale_with_tokens(record: Record) -> Verdict:
    """Judge that streams of a version that no other region serves end with STALE_SNAPSHOT, and no other stream is lost."""
    window = with_open(record, kinds=FREE)
    cut, stale = window.count(CUT), window.total("stale")
    measured = f"{stale} of {cut} lost streams with STALE_SNAPSHOT, {window.count(WRONG)} with wrong tokens"
    is_met = stale > 0 and cut == stale and not window.count(WRONG)
    return Verdict(
        "streams of the dead region's version end with STALE_SNAPSHOT and their tokens", measured, is_met
    )


def nothing_lost(record: Record) -> Verdict:
    """Judge that no request fails; a refusal with RetryInfo is no loss."""
    window = with_open(record)
    lost = window.count(BARE, FAILED, CUT, WRONG)
    measured = f"{lost} lost, {window.count(REFUSED)} refused, of {window.sent}"
    return Verdict("no request lost", measured, window.sent > 0 and not lost)


def no_failover(record: Record) -> Verdict:
    """Judge that the target's callers stay with its frontends."""
    fronts = fault(record, SETTLE_S, homes=(record.target,), kinds=FREE).by_region("fronts")
    aim = "no full failover"
    if not fronts.total():
        return Verdict(aim, NOTHING, is_met=False)
    share = fronts[record.target] / fronts.total()
    return Verdict(aim, f"{share:.1%} of its callers through its own frontends", share >= NO_FAILOVER_MIN)


def own_throughout(record: Record) -> Verdict:
    """Judge the callers of every region from the begin of the event on: good, and through frontends of their home."""
    window = fault(record, kinds=FREE)
    share = window.share(GOOD)
    aim = "each region serves its own callers throughout: at least 99.5 % good, at home"
    if share is None:
        return Verdict(aim, NOTHING, is_met=False)
    away = sum(
        count
        for home in record.regions
        for region, count in fault(record, homes=(home,), kinds=FREE).by_region("fronts").items()
        if region != home
    )
    return Verdict(aim, f"{share:.2%}, {away} through other frontends", share >= 0.995 and not away)


def heals_smoothly(record: Record) -> Verdict:
    """Judge the time from the healing to the end of the run."""
    times = record.times
    window = Window(record.bins, times.heal_s, times.ended_s, kinds=FREE)
    share, after_ms, before_ms = window.share(GOOD), window.ttft_ms(), steady(record, kinds=FREE).ttft_ms()
    aim = f"healing without a jump: at least 99.5 % good, p95 TTFT within {TTFT_FACTOR:g}x"
    if share is None or after_ms is None or before_ms is None:
        return Verdict(aim, NOTHING, is_met=False)
    measured = f"{share:.2%}, {after_ms / before_ms:.2f}x"
    return Verdict(aim, measured, share >= 0.995 and after_ms <= TTFT_FACTOR * before_ms)


def survivors_stay(record: Record) -> Verdict:
    """Judge that weights stay: the survivors' own callers are served at home."""
    aim = "weights stay: survivors' own callers at home"
    served = [fault(record, homes=(home,), kinds=FREE).by_region("served") for home in record.survivors]
    total, at_home = (
        sum(each.total() for each in served),
        sum(each[home] for home, each in zip(record.survivors, served, strict=True)),
    )
    return Verdict(aim, f"{at_home} of {total}", total > 0 and at_home == total)


def errors_not_up(record: Record) -> Verdict:
    """Judge the error rate during the event and the restore against that before it."""
    aim = "error rate up by at most 0.1 points"
    bad = (REFUSED, BARE, FAILED, CUT, WRONG)
    before, after = steady(record, kinds=FREE).share(*bad), whole(record, kinds=FREE).share(*bad)
    if before is None or after is None:
        return Verdict(aim, NOTHING, is_met=False)
    return Verdict(aim, f"{100 * (after - before):+.2f} points", after - before <= ERRORS_UP_MAX)


def sessions_back(record: Record) -> Verdict:
    """Judge that the target had lost its callers, and that the end of the run finds them at home."""
    times, home = record.times, (record.target,)
    away = Window(record.bins, times.heal_s - BACK_WINDOW_S, times.heal_s, homes=home, kinds=FREE)
    back = Window(record.bins, times.ended_s - BACK_WINDOW_S, times.ended_s, homes=home, kinds=FREE)
    aim = f"sessions leave and are back: at least {HOME_SHARE_MIN:.0%} at home at the end"
    left, came = _home_share(away, record.target), _home_share(back, record.target)
    if left is None or came is None:
        return Verdict(aim, NOTHING, is_met=False)
    is_met = came >= HOME_SHARE_MIN and left <= 1.0 - HOME_SHARE_MIN
    return Verdict(aim, f"{left:.1%} at home when drained, {came:.1%} at the end", is_met)


def sessions_back_home(record: Record) -> Verdict:
    """Judge the end of the run: all callers are served at home."""
    times, aim = record.times, f"sessions are back: at least {HOME_SHARE_MIN:.0%} at home at the end"
    shares = [
        _home_share(
            Window(record.bins, times.ended_s - BACK_WINDOW_S, times.ended_s, homes=(home,), kinds=FREE), home
        )
        for home in record.regions
    ]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        return Verdict(aim, NOTHING, is_met=False)
    return Verdict(aim, f"{min(known):.1%} of the region with the fewest", min(known) >= HOME_SHARE_MIN)


def goodput_kept(record: Record) -> Verdict:
    """Judge the survivors' good uncached tokens against their capacity alone, or against the load if that is less."""
    aim = f"survivors keep goodput at {GOODPUT_MIN:g} of their capacity alone, at most {SERVED_MIN:g} of the load"
    window = fault(record, SETTLE_S)
    computed = window.by_region("uncached")
    capacity = sum(record.capacities[name] for name in record.survivors)
    per_s = sum(computed[name] for name in record.survivors) / (record.times.heal_s - SETTLE_S)
    if not window.sent or not capacity:
        return Verdict(aim, NOTHING, is_met=False)
    load = record.utilisation * sum(record.capacities[name] for name in record.regions)
    measured = f"{per_s / capacity:.2f}: {per_s:.0f} of {capacity:.0f} tokens/s, load {load:.0f}"
    return Verdict(aim, measured, per_s >= min(GOODPUT_MIN * capacity, SERVED_MIN * load))


def no_stream_lost(record: Record) -> Verdict:
    """Judge the streams that had tokens, of callers that any region may serve."""
    window = with_open(record, kinds=FREE)
    cut = window.count(CUT)
    return Verdict("no stream lost", f"{cut} of {window.sent}", window.sent > 0 and not cut)


def only_stale_lost(record: Record) -> Verdict:
    """Judge the same where the dead region served a version that no other one serves: its streams may end."""
    window = with_open(record, kinds=FREE)
    cut, stale = window.count(CUT), window.total("stale")
    measured = f"{cut} of {window.sent}, {stale} of them with STALE_SNAPSHOT"
    return Verdict(
        "no stream lost but of a version that no region serves", measured, window.sent > 0 and cut == stale
    )


def amplification(record: Record) -> Verdict:
    """Judge the attempts and client sends per request from the event on."""
    window = whole(record)
    aim = f"retry amplification at most {AMPLIFICATION_MAX:g}"
    if not window.sent:
        return Verdict(aim, NOTHING, is_met=False)
    ratio = window.total("attempts") / window.sent
    return Verdict(aim, f"{ratio:.3f}", ratio <= AMPLIFICATION_MAX)


def no_wrong_token(record: Record) -> Verdict:
    """Judge every token of the whole run."""
    window = with_open(record)
    wrong = window.count(WRONG)
    return Verdict("no wrong token", f"{wrong} of {window.sent} answers", window.sent > 0 and not wrong)


def charged_once(record: Record) -> Verdict:
    """Judge the tokens that the frontends settled against the cost of the requests."""
    aim = "tenants are charged what their requests cost"
    least, most = record.cost
    if record.settled is None or not most:
        return Verdict(aim, NOTHING, is_met=False)
    return Verdict(aim, f"{record.settled} tokens, cost {least} to {most}", least <= record.settled <= most)


def pinned_at_home(record: Record) -> Verdict:
    """Judge that a pinned tenant is served in its region or refused."""
    aim = "a pinned tenant served in its region or refused"
    abroad = served = 0
    for home in record.regions:
        window = whole(record, homes=(home,), kinds=(PINNED,))
        found = window.by_region("served")
        served += found.total()
        tried = window.by_region("tried")
        abroad += max(found.total() - found[home], tried.total() - tried[home])
    return Verdict(aim, f"{abroad} elsewhere, {served} served", served > 0 and not abroad)


def _home_share(window: Window, home: str) -> float | None:
    served = window.by_region("served")
    return served[home] / served.total() if served.total() else None


FULL: Final[tuple[Judge, ...]] = (goodput_kept, own_95, typed, no_stream_lost)
"""Aims at 60 % load, when a region is lost."""

FULL_OF_VERSIONS: Final[tuple[Judge, ...]] = (goodput_kept, own_95, typed, only_stale_lost)
"""The same with regions one version apart."""

ALWAYS: Final[tuple[Judge, ...]] = (amplification, no_wrong_token, pinned_at_home)
"""Aims of every run."""
