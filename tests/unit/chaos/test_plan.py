"""Plans: the same run gives the same plan, and all of them together hold what the matrix promises."""

from __future__ import annotations

from collections import Counter

import pytest

from kvmesh.roles import CONTROL, SERVICES
from tests.chaos.cells import FAULTS, PARTS, Cell, CellError, Run, everything, long_form, parse, short_form
from tests.chaos.plan import AFTER, BEFORE, DURING, OUTPUT_TOKENS, PROMPT_TOKENS, STREAMS, plan_of, probe_of
from tests.chaos.truth import Truth


def test_the_same_run_gives_the_same_plan() -> None:
    """A violation can be had again."""
    for cell in everything():
        assert plan_of(Run(cell, 3)) == plan_of(Run(cell, 3))
        assert plan_of(Run(cell, 3)) != plan_of(Run(cell, 4))
    assert plan_of(Run(Cell("decode", "kill"), 1)).streams != plan_of(Run(Cell("prefill", "kill"), 1)).streams


def test_plans_keep_their_ranges_and_have_everything() -> None:
    """Streams, prompts, phases, kinds of clients, early ends and both replicas all occur, at about their shares."""
    plans = [plan_of(run) for run in long_form(everything())]
    streams = [stream for plan in plans for stream in plan.streams]
    for plan in plans:
        assert STREAMS[0] <= len(plan.streams) <= STREAMS[1]
        assert [stream.number for stream in plan.streams] == list(range(len(plan.streams)))
    for stream in streams:
        assert PROMPT_TOKENS[0] <= len(stream.prompt) <= PROMPT_TOKENS[1]
        low, high = OUTPUT_TOKENS[stream.phase]
        assert low <= stream.max_output_tokens <= high
        assert all(16 <= token < 4096 for token in stream.prompt)
    count = len(streams)
    assert 0.12 < sum(stream.cancel_s is not None for stream in streams) / count < 0.18
    assert 0.07 < sum(stream.deadline_s is not None for stream in streams) / count < 0.13
    assert 0.15 < sum(stream.is_plain for stream in streams) / count < 0.25
    assert 0.35 < sum(stream.temperature == 0.0 for stream in streams) / count < 0.45
    phases = Counter(stream.phase for stream in streams)
    assert set(phases) == {BEFORE, DURING, AFTER} and phases[BEFORE] > count / 2
    shared = Counter(stream.prompt[:20] for plan in plans for stream in plan.streams)
    assert 0.3 < sum(times for times in shared.values() if times > 1) / count < 0.5
    targets = {plan.target for plan in plans}
    assert targets == {
        "redis",
        *(f"{role}-{number}" for role in (*SERVICES, CONTROL) for number in (0, 1)),
        *(f"{role}-{number}-engine" for role in ("prefill", "decode") for number in (0, 1)),
    }


def test_the_long_form_runs_kills_and_pauses_over_five_seeds_and_the_rest_over_two() -> None:
    """Each run once; the first 45 are all cells."""
    runs = long_form(everything())
    assert len(set(runs)) == len(runs) == 8 * (5 + 2 + 5 + 2 + 2) + 2 + 4 * 2
    assert {run.cell for run in runs[:45]} == set(everything())
    seeds = Counter(run.cell.fault for run in runs)
    assert seeds == {"kill": 40, "pause": 40, "term": 16, "cut": 16, "slow": 16, "link": 2, "duplicate": 8}
    assert long_form(parse("redis:cut"), only_seed=7) == [Run(Cell("redis", "cut"), 7)]


def test_the_short_form_has_every_part_and_every_fault() -> None:
    """It stands for the matrix in `make test`."""
    cells = [run.cell for run in short_form()]
    assert {cell.part for cell in cells} == set(PARTS)
    assert {cell.fault for cell in cells} == set(FAULTS)


def test_cells_are_named_singly_by_part_or_by_fault() -> None:
    """A part or a fault alone means all of its cells; nothing means the matrix; order is kept, repeats are not."""
    assert parse("decode:kill, redis:cut") == [Cell("decode", "kill"), Cell("redis", "cut")]
    assert {cell.fault for cell in parse("redis")} == set(FAULTS)
    assert {cell.part for cell in parse("duplicate")} == {"frontend", "router", "prefill", "decode"}
    assert {cell.part for cell in parse("pause")} == set(PARTS)
    assert len(parse("redis,pause,redis:pause")) == 12
    assert parse("") == everything()


def test_a_link_is_cut_between_two_engines_alone() -> None:
    """All four pairs occur; no other fault has a peer."""
    plans = [plan_of(Run(Cell("prefill-engine", "link"), seed)) for seed in range(1, 30)]
    assert {(plan.target, plan.peer) for plan in plans} == {
        (f"prefill-{one}-engine", f"decode-{other}-engine") for one in (0, 1) for other in (0, 1)
    }
    assert parse("link") == [Cell("prefill-engine", "link")]
    assert all(plan_of(run).peer is None for run in long_form(everything()) if run.cell.fault != "link")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("router:burn", "burn"),
        ("router:link", "prefill-engine:link"),
        ("redis:duplicate", "frontend:duplicate, router:duplicate, prefill:duplicate, decode:duplicate"),
        ("toaster:kill", "toaster"),
        ("x", "allowed are frontend"),
    ],
)
def test_cells_that_do_not_exist_are_named(text: str, told: str) -> None:
    """The error says what was wrong and what there is."""
    with pytest.raises(CellError, match=told):
        parse(text)


def test_probes_are_new_prompts() -> None:
    """A probe that found its prompt in cache could not show a prefill replica at work."""
    run = Run(Cell("prefill", "kill"), 1)
    prompts = [probe_of(run, number, 0).prompt for number in range(50)]
    assert len(set(prompts)) == 50


def test_a_replay_line_leads_back_to_the_run() -> None:
    """The command printed beside a violation is valid input."""
    run = Run(Cell("prefill-engine", "pause"), 4)
    words = dict(word.split("=") for word in run.replay.split() if "=" in word)
    assert long_form(parse(words["ONLY"]), only_seed=int(words["SEED"])) == [run]


def test_the_truth_does_not_depend_on_what_was_asked_before() -> None:
    """One store serves all streams, one after the other."""
    streams = plan_of(Run(Cell("decode", "kill"), 3)).streams[:6]
    together = Truth("salt", 4096).of(streams)
    for stream in reversed(streams):
        assert Truth("salt", 4096).tokens(stream) == together[stream.number]
        assert len(together[stream.number]) == stream.max_output_tokens
    assert Truth("other", 4096).of(streams) != together
