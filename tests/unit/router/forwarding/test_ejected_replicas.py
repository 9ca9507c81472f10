"""Outlier ejection in the core: replicas that fail get no requests, are probed, and return."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import A, B, Desk, asked_prefill, first


def fail_on(desk: Desk, name: str) -> None:
    """Let one request fail at decode replica `name`, by the replica's fault. Elsewhere it is cancelled."""
    for _ in range(40):
        desk.submit(request_id=f"{desk.slot + 1:032x}")
        decode, submit = desk.placed()
        if decode == name:
            failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_ENGINE_ERROR)
            desk.down(decode, failures=[failure])
            return
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
        desk.up(decode)
    raise AssertionError(f"{name} was never chosen")


def chosen_replicas(desk: Desk, count: int = 30) -> set[str]:
    """Return the replicas that get requests now."""
    chosen = set()
    for _ in range(count):
        desk.submit(request_id=f"{desk.slot + 1:032x}")
        decode, _ = desk.placed()
        chosen.add(decode)
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
        desk.up(decode)
    return chosen


def test_a_replica_with_consecutive_failures_is_ejected_probed_and_returns() -> None:
    """One of two is ejected for a second. Then one request is the half-open probe, and its good end closes the circuit."""
    desk = Desk(prefills=0)
    for _ in range(3):
        fail_on(desk, "decode-0")
    assert desk.links["decode-0"][0].ejection.is_ejected and desk.core.ejection_total == 1
    assert chosen_replicas(desk) == {"decode-1"}
    desk.wait(1.05)
    for _ in range(40):
        desk.submit(request_id=f"{desk.slot + 1:032x}")
        decode, submit = desk.placed()
        if decode == "decode-0":
            break
    else:
        raise AssertionError("no probe")
    assert chosen_replicas(desk) == {"decode-1"}, "one probe at a time"
    finish = pb.Finish(slot=submit.slot, end_position=0, reason=pb.Finish.REASON_LENGTH)
    desk.down("decode-0", finishes=[finish])
    assert chosen_replicas(desk) == {"decode-0", "decode-1"}


def test_the_last_replica_of_a_role_is_not_ejected() -> None:
    """Both fail: both get requests all the same. So does a replica without a peer in its role."""
    desk = Desk(prefills=0)
    for _ in range(3):
        fail_on(desk, "decode-0")
    desk.links["decode-1"][0].is_listed = False
    assert chosen_replicas(desk) == {"decode-0"}
    desk.links["decode-1"][0].is_listed = True
    for _ in range(3):
        fail_on(desk, "decode-1")
    assert chosen_replicas(desk) == {"decode-0", "decode-1"}


def test_another_boot_of_the_engine_starts_clean() -> None:
    """Failures of the old engine do not count for the new one."""
    desk = Desk()
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="a"))
    for _ in range(3):
        fail_on(desk, "decode-0")
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="a"))
    assert chosen_replicas(desk) == {"decode-1"}
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="b"))
    assert "decode-0" in chosen_replicas(desk)


def test_refusals_and_client_errors_do_not_eject() -> None:
    """Full replicas, errors of clients and drains are no failures of the replica."""
    desk = Desk()
    for number in range(12):
        desk.submit(request_id=f"{number + 1:032x}")
        decode, submit = desk.placed()
        if number % 2:
            desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_INVALID)])
        else:
            desk.down(decode, failures=[pb.Failure(slot=submit.slot, code=pb.Failure.CODE_INVALID)])
    assert not any(replica.ejection.failures for replica, _ in desk.links.values())


@pytest.mark.parametrize("seed", range(8))
def test_one_prompt_at_a_time_probes_a_prefill(seed: int) -> None:
    """Decodes are so full that their answers are awaited.

    A prompt that waits for one is the probe of its prefill already.
    """
    rng, desk, tried = random.Random(seed), Desk(prefills=2, queue=64), set()
    desk.policy.prefills._dispatch_ahead_s = 100.0
    full = pb.LoadReport(
        engine_ready=True, block_total_count=1000, block_free_count=200, block_reserved_count=800
    )
    for name in ("decode-0", "decode-1"):
        desk.down(name, load_report=full)
    ejected = desk.links["prefill-0"][0]
    for _ in range(3):
        desk.now_s += 0.001
        ejected.failed(desk.now_s, desk.now_s, "x")
    desk.wait(1.1)
    for _ in range(60):
        if rng.random() < 0.6:
            submit_another(desk)
        else:  # also the probe: then another may follow
            slots = [item.slot for item in desk.core.attempts.open if item.prefill.replica is ejected]
            slot = rng.choice([*slots, 1 + rng.randrange(desk.slot + 1)])
            desk.ask(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT)])
        for name in ("decode-0", "decode-1"):
            for one in desk.up(name).submits:
                if rng.random() < 0.3:
                    desk.down(name, acceptances=[pb.Acceptance(slot=one.slot)])
                elif rng.random() < 0.3:
                    refusal = pb.Refusal(slot=one.slot, reason=pb.Refusal.REASON_KV_FULL)
                    desk.down(name, refusals=[refusal])
        there = [item for item in desk.core.attempts.open if item.prefill.replica is ejected]
        assert len(there) <= 1, seed
        tried |= {item.submitted.request_id for item in there}
        desk.wait(0.06)
    assert len(tried) >= 3, "no probe followed one that left"


def test_a_probe_ends_when_a_takeover_inherits_its_handoff() -> None:
    """Another stream takes the request over while decode pulls from the prefill that is probed."""
    desk = Desk()
    decode, decode_slot, prefill_slot = desk.handed_over()
    prefill = desk.links["prefill-0"][0]
    (item,) = desk.core.attempts.open
    for _ in range(3):
        desk.now_s += 0.001
        prefill.failed(desk.now_s, desk.now_s, "x")
    desk.now_s += 2
    desk.down(decode, load_report=pb.LoadReport(engine_ready=True))
    prefill.on_sent(item, desk.now_s)
    assert not prefill.ejection.may_take(desk.now_s)
    desk.ask(
        adopts=[
            pb.Adopt(slot=9, request_id=A, attempt=1, position=1, credit_position=100, decode_replica=decode)
        ]
    )
    (adopt,) = desk.up(decode).adopts
    finish = pb.Finish(slot=decode_slot, end_position=1, reason=pb.Finish.REASON_ADOPTED)
    desk.down(decode, acceptances=[pb.Acceptance(slot=adopt.slot)], finishes=[finish])
    assert prefill.slots[prefill_slot] is not item
    desk.down(decode, transfers=[pb.Transfer(slot=adopt.slot)])
    assert prefill.ejection.may_take(desk.now_s)


def submit_another(desk: Desk, **changes: Any) -> None:
    """Submit a request with a new prompt."""
    ids = pack_ids(range(1000 * desk.slot, 1000 * desk.slot + 20))
    hashes = blocks.pack(blocks.chain(ids, 4, "m"))
    desk.submit(request_id=f"{desk.slot + 1:032x}", token_ids=ids, block_hashes=hashes, **changes)


def pull(desk: Desk, broken: str) -> set[str]:
    """Run one request. Its handoff is lost if one of its replicas is `broken`. Return its replicas."""
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    prefill, slot = asked_prefill(desk)
    desk.down(prefill, starts=[pb.Start(slot=slot)], first_tokens=[first(slot)])
    if broken in (prefill, decode):
        failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_HANDOFF_LOST)
        desk.down(decode, failures=[failure])
    else:
        finish = pb.Finish(slot=submit.slot, end_position=1, reason=pb.Finish.REASON_LENGTH)
        desk.down(decode, transfers=[pb.Transfer(slot=submit.slot)], finishes=[finish])
    for name in desk.links:
        desk.up(name)
    desk.told()
    desk.wait(0.01)
    return {prefill, decode}


@pytest.mark.parametrize("broken", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_only_the_side_that_loses_handoffs_is_ejected(broken: str) -> None:
    """A first token is no good end of a prefill. Other transfers decide which side of a lost handoff failed."""
    desk, asked = Desk(prefills=2, queue=64), 0
    for _ in range(90):
        submit_another(desk)
        asked += broken in pull(desk, broken)
        if broken.startswith("prefill"):
            decodes = [desk.links[name][0] for name in ("decode-0", "decode-1")]
            assert not any(replica.ejection.failures for replica in decodes)
        trusted = {name: not replica.ejection.is_ejected for name, (replica, _) in desk.links.items()}
        if not trusted.pop(broken):
            break
    assert desk.links[broken][0].ejection.is_ejected and asked <= 12
    if broken.startswith("prefill"):
        assert all(trusted.values())


def test_a_decode_that_fails_prompts_of_its_own_before_their_first_token_is_ejected() -> None:
    """No token was streamed, so the failure is untouched. The engine had the prompt all the same."""
    desk = Desk(queue=64, local=1000)
    for _ in range(40):
        submit_another(desk)
        decode, submit = desk.placed()
        assert submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
        desk.down(decode, starts=[pb.Start(slot=submit.slot)])
        if decode == "decode-0":
            failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_ENGINE_ERROR, untouched=True)
            desk.down(decode, failures=[failure])
        else:
            finish = pb.Finish(slot=submit.slot, end_position=0, reason=pb.Finish.REASON_LENGTH)
            desk.down(decode, finishes=[finish])
        desk.wait(0.01)
    assert desk.links["decode-0"][0].ejection.is_ejected and desk.core.ejection_total == 1


@pytest.mark.parametrize("prefills", [1, 2, 4])
def test_prefills_that_report_being_busy_are_not_ejected(prefills: int) -> None:
    """Prompts wait longer than estimated at every prefill: none is ejected, and no prompt moves around."""
    desk, submits = Desk(prefills=prefills, queue=256), 0
    desk.policy.prefills._dispatch_ahead_s = 100.0
    busy = pb.LoadReport(engine_ready=True, queued_request_count=50, running_request_count=1)
    for tick in range(40):
        if tick < 5 * prefills:
            submit_another(desk)
        for name in list(desk.links):
            asked = desk.up(name).submits
            desk.down(name, acceptances=[pb.Acceptance(slot=one.slot) for one in asked])
            if name.startswith("prefill"):
                submits += len(asked)
                desk.down(name, load_report=busy)
        desk.wait(0.5)
    assert submits == 5 * prefills and desk.core.ejection_total == 0
    assert not desk.told().failures


@pytest.mark.parametrize("count", range(2, 8))
def test_half_of_a_role_is_ejected_at_most(count: int) -> None:
    """One of two is ejected. If most fail, those with the earliest end of ejection get requests beside the trusted ones."""
    desk = Desk(prefills=0)
    names = [f"decode-{index}" for index in range(count)]
    for name in names[2:]:
        desk.add(name, "decode")
    for ejected, name in enumerate(names[:-1], start=1):
        for _ in range(3):
            desk.links[name][0].failed(desk.now_s, desk.now_s, "x")
        offered = [one.name for one in desk.core.dispatcher.view(desk.now_s).decode]
        assert len(offered) == max(count - ejected, count - count // 2)
        assert set(names[ejected:]) <= set(offered)
        desk.wait(0.01)


def test_a_held_handoff_is_no_probe() -> None:
    """The ejected prefill ran the prompt and decode was lost: another request may probe it while the handoff is held."""
    desk = Desk(prefills=2)
    ejected, other = desk.links["prefill-0"][0], desk.links["prefill-1"][0]
    for _ in range(3):
        ejected.failed(desk.now_s, desk.now_s, "x")
    desk.wait(1.1)
    other.is_draining = True
    decode, _, slot = desk.reserved(request_id=A)
    other.is_draining = False
    desk.down("prefill-0", starts=[pb.Start(slot=slot)])
    desk.down("prefill-0", first_tokens=[first(slot)])
    assert ejected.ejection.probe is not None
    desk.lose(decode)
    assert desk.core.attempts.open and ejected.ejection.probe is None


def verdict(desk: Desk, replica: str, slot: int, code: Any = pb.Failure.CODE_INVALID) -> pb.Failure:
    """Let `replica` fail `slot` by a verdict. Return the failure that the frontend gets."""
    desk.down(replica, failures=[pb.Failure(slot=slot, code=code, message="m", replica=replica)])
    (failure,) = desk.told().failures
    assert failure.code == code and failure.replica == replica
    return failure


@pytest.mark.parametrize("code", [pb.Failure.CODE_INVALID, pb.Failure.CODE_INVALID_TOKEN])
def test_a_verdict_can_be_cross_checked_if_the_role_has_another_replica(code: Any) -> None:
    """Two decode replicas: yes. The only prefill replica: no. The only decode replica that is not ejected: no."""
    desk = Desk()
    decode, slot = desk.generating()
    assert verdict(desk, decode, slot, code).contestable
    _, _, prefill_slot = desk.reserved(request_id=f"{2:032x}")
    assert not verdict(desk, "prefill-0", prefill_slot, code).contestable
    decode, slot = desk.generating(request_id=f"{3:032x}")
    other = "decode-1" if decode == "decode-0" else "decode-0"
    desk.links[other][0].is_listed = False
    assert not verdict(desk, decode, slot, code).contestable
    assert not any(replica.ejection.failures for replica, _ in desk.links.values()), (
        "a verdict alone does not count"
    )


def test_a_refusal_as_invalid_names_its_replica() -> None:
    """A refusal of the router itself names none."""
    desk = Desk()
    desk.submit()
    decode, submit = desk.placed()
    invalid = pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_INVALID, field="x")
    desk.down(decode, refusals=[invalid])
    (told,) = desk.told().refusals
    assert (told.replica, told.field) == (decode, "x")
    desk.submit(request_id=B, output=0)
    (told,) = desk.told().refusals
    assert told.reason == pb.Refusal.REASON_INVALID and not told.replica


def test_an_attempt_avoids_the_replica_that_it_cross_checks() -> None:
    """Also at a router that does not know the verdict. Without another replica, the attempt goes there all the same."""
    desk = Desk(prefills=0)
    for number in range(20):
        desk.submit(request_id=f"{number + 1:032x}", contested_replicas=["decode-0"])
        decode, _ = desk.placed()
        assert decode == "decode-1"
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
        desk.up(decode)
    desk.links["decode-1"][0].is_listed = False
    desk.submit(request_id=A, contested_replicas=["decode-0"])
    assert desk.placed()[0] == "decode-0"


def test_contradictions_eject_and_old_or_foreign_ones_do_not() -> None:
    """Three consecutive ones of one moment eject.

    Those of an unknown replica, or from before an engine's boot, do not count.
    """
    desk = Desk(prefills=0)
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="a"))
    desk.wait(1.0)
    rows = [pb.Contradiction(replica=name, age_ms=500) for name in ("decode-0", "decode-0", "nobody")]
    desk.ask(contradictions=rows)
    assert desk.links["decode-0"][0].ejection.failures == 2 and desk.core.contradiction_total == 3
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="b"))
    desk.ask(contradictions=rows)
    assert desk.links["decode-0"][0].ejection.failures == 0
    desk.wait(1.0)
    desk.ask(contradictions=rows)
    assert desk.core.ejection_total == 0
    desk.ask(contradictions=rows)
    assert desk.core.ejection_total == 1
    assert chosen_replicas(desk) == {"decode-1"}
