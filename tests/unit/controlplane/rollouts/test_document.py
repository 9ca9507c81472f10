"""Documents: JSON and back, bounds, hostile and later data, and the view for operators."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from controlplane.rollouts import document as documents
from controlplane.rollouts import verdict as verdicts
from controlplane.rollouts.document import Change, DocumentError, decode, encode, to_message
from controlplane.rollouts.verdict import Gate
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2
from tests.unit.controlplane.rollouts.facts import CHANGE, PASSED, SETTINGS, STATES, in_state, run, start


@pytest.mark.parametrize("state", STATES)
def test_json_keeps_everything(state: str) -> None:
    """A leader reads the document that another leader wrote."""
    document = in_state(state)
    assert decode("r-1", encode(document)) == document
    assert json.loads(encode(document))["state"] == state


def test_fields_of_a_later_release_are_ignored() -> None:
    """At every level of the document."""
    document = in_state("COMPLETED")
    plain = json.loads(encode(document))
    for each in (plain, plain["settings"], plain["timing"], plain["changes"][0], plain["origin"]):
        each["colour"] = {"of": ["a", "later", "release"]}
    assert decode("r-1", json.dumps(plain).encode()) == document


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "cannot be read"),
        (b"{}", "missing required field"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b" " * (documents.DOCUMENT_BYTES_MAX + 1), "up to 786432 are allowed"),
        (encode(start()).replace(b'"PENDING"', b'"RESTING"'), "RESTING"),
        (
            encode(start()).replace(b'"weight_percent":0,"base', b'"weight_percent":40,"base'),
            "contradicts itself",
        ),
        (encode(start()).replace(b'"steps_percent":[10,', b'"steps_percent":[70,'), "must be above"),
        (encode(start()).replace(b'"id":"r-1"', b'"id":"r-2"'), 'has the id "r-2"'),
        (encode(start()).replace(b'"revision":1', b'"revision":0'), "contradicts itself"),
    ],
)
def test_an_unreadable_document_is_named(data: bytes, text: str) -> None:
    """The error has the rollout's id and the cause."""
    with pytest.raises(DocumentError, match="r-1") as error:
        decode("r-1", data)
    assert text in str(error.value)


def test_the_oldest_verdicts_lose_their_details_first() -> None:
    """A document stays below its bound. The last verdict keeps its gates."""
    gates = tuple(Gate(name=f"gate-{at}", reason="x" * 2700) for at in range(40))
    verdict = structs.replace(PASSED, gates=gates)
    changes = tuple(
        Change(state_name="PENDING", step=0, at_s=0.0, reason="r", verdict=verdict) for _ in range(12)
    )
    document = structs.replace(start(), changes=changes)
    data = encode(document)
    found = decode("r-1", data)
    assert len(data) <= documents.DOCUMENT_BYTES_MAX
    kept = [bool(change.verdict and change.verdict.gates) for change in found.changes]
    assert kept == sorted(kept) and kept[-1] and not kept[0]
    assert found.changes[0].verdict == structs.replace(verdict, gates=(), samples=())


def test_a_document_that_stays_too_large_is_an_error() -> None:
    """It names the rollout and the size."""
    with pytest.raises(DocumentError, match=r"r-1.*801"):
        encode(structs.replace(start(), judge="x" * 800_000))


def test_changes_are_bounded_and_keep_the_first() -> None:
    """Pauses and resumes without end do not grow the document."""
    document = in_state("BAKING")
    for _ in range(60):
        document = run(run(document, CHANGE.CHANGE_PAUSE), CHANGE.CHANGE_RESUME)
    assert len(document.changes) == documents.CHANGES_MAX
    assert document.changes[0].state_name == "PENDING"


def test_operators_see_the_whole_document() -> None:
    """Each field of the message has its value, verdicts at changes included."""
    settings = structs.replace(SETTINGS, requirements=("evals",), on_inconclusive=SETTINGS.on_inconclusive)
    document = in_state("PAUSED", settings)
    document = run(document, CHANGE.CHANGE_ATTEST, requirement="evals", passed=True)
    message = to_message(structs.replace(document, silent_frontends=("frontend-9",), waits_for=("a",)))
    assert message.state == snapshot_pb2.ROLLOUT_STATE_PAUSED and message.rollout == "r-1"
    assert (message.step, message.weight_percent, message.from_pool) == (1, 10, "stable")
    assert (message.from_version, message.to_version, message.started_by) == ("v1", "v2", "alice")
    assert message.verdict == verdicts.to_message(PASSED) and message.verdict.kind == pb.Verdict.KIND_PASS
    assert message.changes[-1].verdict == message.verdict and message.changes[-1].by == "bob"
    assert message.attestations[0].requirement == "evals" and message.attestations[0].passed
    assert message.silent_frontends == ["frontend-9"] and message.waits_for == ["a"]
    assert message.started_at.seconds == 1_800_000_000 and message.revision == document.revision


def test_a_verdict_returns_as_it_was() -> None:
    """Through a message and back; figures that are unknown stay unknown. `needs` is the leader's own."""
    verdict = structs.replace(
        PASSED, gates=(*PASSED.gates, Gate(name="golden", result="passes")), is_weak=True
    )
    assert verdicts.of_message(verdicts.to_message(verdict)) == verdict
    later = pb.Verdict(reason="new")
    later.kind = 99  # type: ignore[assignment]  # a later release
    assert verdicts.of_message(later).kind is verdicts.VerdictKind.INCONCLUSIVE


@pytest.mark.parametrize("unix_s", [-5.0, 1e300, 1.999_999_999_9])
def test_times_outside_a_timestamp_are_clipped(unix_s: float) -> None:
    """A document with a hostile time can be shown."""
    stamp = documents.timestamp(unix_s)
    assert stamp.seconds >= 0 and 0 <= stamp.nanos < 1_000_000_000 and stamp.ToJsonString()
