"""Scripted prefill and decode replicas that keep the protocol and take random time."""

from __future__ import annotations

from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.peers import BLOCK, ORPHAN_S, Link, Peer, Run, token


class FakePrefill(Peer):
    """queued -> started -> held -> gone."""

    role = "prefill"

    def on_request(self, link: Link, message: pb.AttachRequest) -> None:
        self.check(link, message)
        for cancel in message.cancels:
            if (run := self.find(link, cancel.slot)) is not None:
                if cancel.reason == pb.Cancel.REASON_TRANSFERRED:
                    assert run.submit.request_id in self.world.pulled, "forgotten before it was pulled"
                self.runs.remove(run)
        assert not message.handoffs and not message.adopts
        for submit in message.submits:
            assert submit.phase == pb.PHASE_CONTEXT_ONLY
            assert link.down_outbox is not None
            if self.world.chance(0.03):
                link.down_outbox.refuse(submit.slot, pb.Refusal.REASON_QUEUE_FULL, "full")
            else:
                link.down_outbox.accept(submit.slot)
                self.runs.append(Run(submit, link, submit.slot, "queued"))

    def close(self, link: Link) -> None:
        for run in list(self.runs):
            if run.link is link:
                run.link = None
                run.expires_s = self.world.now_s + ORPHAN_S
                if run.state != "held":
                    self.runs.remove(run)

    def act(self) -> None:
        runs = [run for run in self.runs if run.link is not None and run.state != "held"]
        if not runs:
            return
        run = self.world.rng.choice(runs)
        assert run.link is not None and run.link.down_outbox is not None
        out, submit = run.link.down_outbox, run.submit
        if self.world.chance(0.04):
            out.fail(run.slot, pb.Failure.CODE_ENGINE_ERROR, "broke", untouched=run.state == "queued")
            self.runs.remove(run)
        elif self.world.chance(0.02):
            out.finish(run.slot, submit.start_position, pb.Finish.REASON_DEADLINE)
            self.runs.remove(run)
        elif run.state == "queued":
            run.state = "started"
            out.start(run.slot, 100)
        else:
            run.state = "held"
            tokens = len(submit.token_ids) // 4
            cached = min(tokens - 1, BLOCK * self.world.rng.randint(0, tokens // BLOCK))
            out.first_token(
                pb.FirstToken(
                    slot=run.slot,
                    position=submit.start_position,
                    token_id=token(submit.request_id, submit.start_position),
                    context_phase_params=f"{self.name} {submit.request_id} {submit.attempt}".encode(),
                    cached_token_count=cached,
                    computed_token_count=tokens - cached,
                    prefill_us=1000 + 10 * (tokens - cached),
                )
            )


class FakeDecode(Peer):
    """pending -> running -> ended; sends tokens within the flow-control window, sometimes twice."""

    def on_request(self, link: Link, message: pb.AttachRequest) -> None:
        self.check(link, message)
        out = link.down_outbox
        assert out is not None
        for cancel in message.cancels:
            if (run := self.find(link, cancel.slot)) is not None:
                self.runs.remove(run)
        for adopt in message.adopts:
            self.adopt(link, adopt)
        for submit in message.submits:
            self.submit(link, submit)
        for handoff in message.handoffs:
            run = self.find(link, handoff.slot)
            if run is None or run.state != "pending":
                continue
            assert handoff.kv_address and handoff.first_token_count == 1
            name, request_id, attempt = handoff.context_phase_params.decode().split()
            assert request_id == run.submit.request_id and int(attempt) == run.submit.attempt
            run.state = "running"
            run.sent = run.end = run.submit.start_position + 1
            out.start(run.slot, 1)
            self.pull(run, name)
        for slot, position in zip(message.credit_slots, message.credit_positions, strict=True):
            if (run := self.find(link, slot)) is not None:
                run.credit = max(run.credit, position)

    def pull(self, run: Run, prefill: str) -> None:
        held = any(
            other.submit.request_id == run.submit.request_id and other.submit.attempt == run.submit.attempt
            for other in self.world.peers[prefill].runs
        )
        assert run.link is not None and run.link.down_outbox is not None
        if held:
            self.world.pulled.add(run.submit.request_id)
            run.link.down_outbox.transfer(run.slot, 500)
        else:
            run.link.down_outbox.fail(run.slot, pb.Failure.CODE_HANDOFF_LOST, "no such handoff")
            self.runs.remove(run)

    def submit(self, link: Link, submit: pb.Submit) -> None:
        out = link.down_outbox
        assert out is not None
        for known in self.runs:
            if known.submit.request_id == submit.request_id and known.state != "ended":
                if known.submit.attempt >= submit.attempt:
                    out.refuse(submit.slot, pb.Refusal.REASON_SUPERSEDED, "known")
                    return
                if known.link is not None and known.link.down_outbox is not None:
                    known.link.down_outbox.finish(known.slot, known.sent, pb.Finish.REASON_SUPERSEDED)
                self.runs.remove(known)
                break
        if self.world.chance(0.08):
            reason = self.world.rng.choice((pb.Refusal.REASON_KV_FULL, pb.Refusal.REASON_DRAINING))
            out.refuse(submit.slot, reason, "full")
            return
        is_local = submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
        run = Run(submit, link, submit.slot, "running" if is_local else "pending")
        run.sent = run.end = submit.start_position
        run.credit = submit.credit_position
        self.runs.append(run)
        out.accept(submit.slot)
        if is_local:
            out.start(submit.slot, 1)

    def adopt(self, link: Link, adopt: pb.Adopt) -> None:
        out = link.down_outbox
        assert out is not None
        for run in self.runs:
            if run.submit.request_id == adopt.request_id and run.submit.attempt == adopt.attempt:
                if run.state == "pending" or not run.submit.start_position <= adopt.position <= run.end:
                    break
                if run.link is not None and run.link.down_outbox is not None:
                    run.link.down_outbox.finish(run.slot, run.sent, pb.Finish.REASON_ADOPTED)
                run.link, run.slot, run.sent = link, adopt.slot, adopt.position
                run.credit, run.expires_s = adopt.credit_position, float("inf")
                if run.state == "ended":
                    run.state = "running"
                out.accept(adopt.slot)
                return
        out.refuse(adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, "unknown")

    def close(self, link: Link) -> None:
        for run in list(self.runs):
            if run.link is link:
                run.link = None
                run.expires_s = self.world.now_s + ORPHAN_S
                if run.state == "pending":
                    self.runs.remove(run)

    def act(self) -> None:
        rng = self.world.rng
        for run in rng.sample(self.runs, rng.randint(0, len(self.runs))):
            if run.state == "running":
                self.step(run)
        for link in self.world.links:
            if link.peer is self and link.down_outbox is not None and rng.random() < 0.2:
                self.report(link)

    def step(self, run: Run) -> None:
        submit, rng = run.submit, self.world.rng
        last = submit.start_position + submit.budget.max_output_tokens
        run.end = min(last, run.end + rng.randint(0, 3))
        if run.link is None or run.link.down_outbox is None:
            return
        out = run.link.down_outbox
        if self.world.chance(0.01):
            out.fail(run.slot, pb.Failure.CODE_ENGINE_ERROR, "broke")
            self.runs.remove(run)
            return
        until = min(run.end, run.credit)
        is_local = submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
        if is_local and run.sent == submit.start_position and until > run.sent and run.slot == submit.slot:
            out.first_token(
                pb.FirstToken(
                    slot=run.slot,
                    position=run.sent,
                    token_id=token(submit.request_id, run.sent),
                    cached_token_count=0,
                    computed_token_count=len(submit.token_ids) // 4,
                )
            )
            run.sent += 1
        if until > run.sent:
            low = run.sent
            if self.world.chance(0.1):  # a repeat
                low = max(submit.start_position, low - rng.randint(1, 3))
            ids = [token(submit.request_id, at) for at in range(low, until)]
            out.tokens(run.slot, low, frames.pack_ids(ids))
            run.sent = until
        if run.sent == last:
            out.finish(run.slot, last, pb.Finish.REASON_LENGTH)
            run.state, run.link = "ended", None
            run.expires_s = self.world.now_s + ORPHAN_S
