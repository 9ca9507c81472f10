"""Tables of `kvmesh up`, `generate --explain`, `models` and `status` on a terminal of 80 columns, with long names."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cli import models
from kvmesh.cli.mesh_file import ListedProcess
from kvmesh.cli.screen import ExplanationTable, address_table, attempts_table, candidates_table
from kvmesh.cli.status import PrefillCosts, ProcessStatus, Sample, _table
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.unit.cli.control.messages import text_of

TERMINAL = 80
MODEL = "acme/llama-3.3-70b-instruct-fp8-tensorrt"
VERSIONS = ("llama-3.3-70b-instruct-fp8-2026-11-20", "llama-3.3-70b-instruct-fp8-2026-11-27")
POOL = "stable-young"
REGIONS = ("eu-central-1", "us-east-1", "ap-southeast-2")
assert len(MODEL) == 40


def check(shown: str, *words: str) -> None:
    """Check that each word is whole, and that no line is too long or cut."""
    assert max(map(len, shown.splitlines())) <= TERMINAL, shown
    assert "…" not in shown
    seen = re.split(r"[\s,│┃]+", shown)
    for word in words:
        assert word in seen, (word, shown)


def explained(attempts: int = 3, candidates: int = 6, prefix: str = f"{POOL}-") -> pb.Finished:
    """Return the end of an answer that moved between regions and decode replicas."""
    finished = pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH)
    finished.usage.prompt_token_count, finished.usage.output_token_count = 120_345, 4096
    finished.explanation.pool, finished.explanation.model_version = POOL, VERSIONS[0]
    for number in range(attempts):
        one = finished.explanation.attempts.add(
            number=number + 1,
            cause=pb.AttemptExplanation.Cause.Value("CAUSE_FIRST") if not number else 2,
            start_position=number * 1000,
            region=REGIONS[number % len(REGIONS)],
            router=f"{prefix}router-{number}",
            prefill_replica=f"{prefix}prefill-{number}",
            decode_replica=f"{prefix}decode-{number}",
            fault="REPLICA_LOST" if number < attempts - 1 else "",
            prompt_block_count=7521,
        )
        for at in range(candidates):
            row = one.candidates.add(
                replica=f"{prefix}decode-{at}", matched_block_count=7000 + at, score=12.5 + at
            )
            for duration in (row.queue, row.prefill, row.decode):
                duration.FromMilliseconds(1234)
    return finished


def test_an_explanation_keeps_every_name_whole() -> None:
    """Pool, version, regions, router and replicas are whole words, for one answer and for two."""
    for titles in (["this request"], ["opened", "continued"]):
        shown = text_of(ExplanationTable([(title, explained()) for title in titles]), width=TERMINAL)
        check(shown, POOL, VERSIONS[0], *REGIONS, f"{POOL}-router-2", f"{POOL}-prefill-2", f"{POOL}-decode-2")
        assert all(title in shown for title in titles)


def test_short_answers_stand_beside_each_other() -> None:
    """A demo compares two answers row by row."""
    finished = explained(1, prefix="")
    finished.explanation.model_version = "v1"
    shown = text_of(ExplanationTable([("opened", finished), ("continued", finished)]), width=TERMINAL)
    assert any("opened" in line and "continued" in line for line in shown.splitlines())


def test_attempts_at_three_decode_replicas_are_whole() -> None:
    """Region and router, replicas and the fault of each attempt."""
    table = attempts_table(explained())
    names = [f"{POOL}-{role}-{number}" for role in ("prefill", "decode") for number in range(3)]
    routers = [f"{region}/{POOL}-router-{number}" for number, region in enumerate(REGIONS)]
    shown = text_of(table, width=TERMINAL)
    check(shown, *names, *routers, "REPLICA_LOST")
    for name in names:
        assert f"{name.split('-')[-2]} {name}" in shown, "a line broke between a column and its cell"
    assert "┃ attempt ┃" in text_of(table, width=200)


@pytest.mark.parametrize("prefix", ["", f"{POOL}-"])
def test_candidates_are_whole(prefix: str) -> None:
    """Name, matched blocks and times of each candidate."""
    shown = text_of(candidates_table(explained(prefix=prefix)), width=TERMINAL)
    check(
        shown, *(f"{prefix}decode-{at}" for at in range(6)), *(f"{12_500 + at * 1000}.0" for at in range(6))
    )
    assert shown.count("1234.0 ms") == 18


@given(
    st.lists(st.text("abcdefgh-0123", min_size=1, max_size=40), min_size=1, max_size=3, unique=True),
    st.integers(2, 3),
)
def test_names_of_forty_characters_are_whole(names: list[str], attempts: int) -> None:
    """Random names of replicas and routers are whole in both tables."""
    finished = explained(attempts)
    for one, name in zip(finished.explanation.attempts, itertools.cycle(names), strict=False):
        one.router = one.prefill_replica = one.decode_replica = name
        one.region = ""
    last = finished.explanation.attempts[-1].router
    check(text_of(ExplanationTable([("this request", finished)]), width=TERMINAL), last)
    used = names[:attempts]
    check(text_of(attempts_table(finished), width=TERMINAL), *used)


def reports(prefix: str) -> list[ProcessStatus]:
    """Return the status of the processes of a pool, with loads of four digits."""
    load: dict[str, dict[str, float]] = {
        "router": {"live_requests": 1234, "queued_requests": 13, "index_blocks": 140_000, "imbalance": 1.25},
        "decode": {"running_requests": 1234, "pending_slots": 20, "reserved_blocks": 2100, "kv_blocks": 8192},
    }
    replicas = {f"{prefix}decode-{number}": "127.0.0.1:4" for number in range(3)}
    made = []
    for role, name in (
        ("frontend", "frontend-0"),
        ("router", f"{prefix}router-0"),
        *(("decode", each) for each in replicas),
        *(("engine", f"{each}-engine") for each in replicas),
    ):
        values = {**load.get(role, {}), "process_resident_bytes": 91 << 20, "prompt_tokens_total": 5}
        metrics = [
            Sample(name=f"kvmesh_{role}_{key}", labels={}, value=float(value))
            for key, value in values.items()
        ]
        made.append(
            ProcessStatus(
                name=name,
                role=role,
                address="127.0.0.1:45001",
                is_healthy=role != "engine",
                metrics=None if role == "engine" else metrics,
                redis_connected=True if role == "router" else None,
                prefill_costs=PrefillCosts(
                    c0_s=0.0123, a_s=3e-5, b_s=1e-9, measured_prompts=1234, factors={name: 1.9}
                )
                if role == "router"
                else None,
                eligible_replicas=replicas if role == "router" else None,
            )
        )
    return made


@pytest.mark.parametrize("prefix", ["", f"{POOL}-"])
def test_a_status_keeps_names_whole(prefix: str) -> None:
    """Each process, its health and its load. With the short names of a mesh without pools its address, too."""
    given_ = reports(prefix)
    shown = text_of(_table(given_), width=TERMINAL)
    check(shown, *(each.name for each in given_), "serving", "1234", "140000", "imbalance", "connected")
    assert ("127.0.0.1:45001" in shown) == (not prefix)
    assert ("Left out at 80 columns: address; --json has them." in shown) == bool(prefix)
    check(shown, *(f"{prefix}decode-{number}" for number in range(3)))


@pytest.mark.parametrize("prefix", ["", f"{POOL}-"])
def test_the_addresses_of_up_are_whole(prefix: str) -> None:
    """A client needs the address of each frontend."""
    members = [
        ListedProcess(
            name=f"{prefix}prefill-{number}-engine",
            role="engine",
            pid=1_234_567,
            address="127.0.0.1:45001",
            metrics_address="127.0.0.1:45002",
            log="",
        )
        for number in range(3)
    ]
    check(text_of(address_table(members), width=TERMINAL), members[0].name, "127.0.0.1:45001")


def test_models_of_forty_characters_are_whole() -> None:
    """Model, versions and what a request may use."""
    found = pb.ListModelsResponse()
    for number in range(2):
        found.models.add(
            model=f"{MODEL[:-1]}{number}",
            versions=VERSIONS,
            context_token_count=131_072,
            default_max_output_tokens=1024,
            max_output_tokens=16_384,
            serving=True,
            capabilities=["tools", "logprobs", "penalties"],
        )
    shown = text_of(models.table(found), width=TERMINAL)
    check(shown, f"{MODEL[:-1]}0", f"{MODEL[:-1]}1", *VERSIONS, "131", "072", "tools", "penalties")


def test_figures_of_a_resumed_answer_name_their_attempt() -> None:
    """The last attempt read the prompt and the output that was there."""
    finished = pb.Finished(usage=pb.Usage(prompt_token_count=9, output_token_count=120))
    for number, start in ((1, 0), (2, 90)):
        finished.explanation.attempts.add(
            number=number, start_position=start, cached_token_count=96 * (number - 1), router="router-0"
        )
    shown = " ".join(text_of(ExplanationTable([("answer", finished)]), width=TERMINAL).split())
    assert "tokens cached, attempt 2 │ 96 of 99" in shown and "prefill time, attempt 2" in shown
    del finished.explanation.attempts[1]
    shown = " ".join(text_of(ExplanationTable([("answer", finished)]), width=TERMINAL).split())
    assert "tokens cached │ 0 of 9" in shown
