"""Random schedules of faults for a simulated control plane, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from controlplane.judging import Judging
from controlplane.rollouts.settings import OnInconclusive, RolloutSettings
from kvmesh.cli.control.stable_content import stable_snapshot
from kvmesh.snapshot.content import RolloutState
from kvmesh.snapshot.published import Published
from tests.simulation.control.nodes import Control, Node
from tests.simulation.control.scripted_judge import ScriptedJudge
from tests.simulation.control.simulated_redis import Copies, Dump
from tests.simulation.control.traffic import Traffic
from tests.simulation.control.world import World

ENDS_S = 90.0
"""Time of the faults. After it everything heals."""

REAL_JUDGE_EVERY = 10
"""One of so many seeds has the real judge."""

ERROR_SHARE = 0.3
"""Share of the bad version's requests with an error."""

END_MAX_S = 900.0
"""Time after the healing in which every rollout ends: the longest step, the drain and the kept pool."""


class Schedule:
    """Runs one seed: a rollout under faults, the healing, the end."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.is_quiet = False
        """True once the mesh has healed: no further rollout starts."""
        self.rng = random.Random(seed)
        judge = self._judge()
        self.is_judged = seed % REAL_JUDGE_EVERY == 0
        """True if the real judge decides, by simulated requests."""
        self.is_bad = self.is_judged and bool(seed // REAL_JUDGE_EVERY % 2)
        """True if the new version has errors."""
        self.world = World(
            seed, controls=self.rng.choice((1, 2, 3)), judge=Judging if self.is_judged else judge
        )
        if self.is_judged:
            self._give_traffic()
        self.settings = RolloutSettings(
            to_pool="next",
            baseline_pool=self.rng.choice(("", "stable-young")),
            steps_percent=self.rng.choice(
                ((10, 50, 100), (20, 50, 100) if self.is_judged else (1, 5, 25, 50, 100), (100,))
            ),
            bake_s=60.0 if self.is_judged else 10.0,
            bake_max_s=240.0 if self.is_judged else 60.0,
            keep_old_s=10.0,
            on_inconclusive=OnInconclusive.ROLLBACK,
        )
        for node in (*self.world.controls.values(), *self.world.peers.values()):
            node.keeps_state = self.rng.random() < 0.3

    def _give_traffic(self) -> None:
        for peer in self.world.peers.values():
            if peer.role == "frontend":
                requests = random.Random(f"{self.seed} {peer.name}")
                peer.traffic = Traffic(requests, "next" if self.is_bad else "", ERROR_SHARE)

    def _judge(self) -> type[ScriptedJudge]:
        fails_at = self.rng.choice((0, 0, 0, 1, 2, 3))
        after_s = self.rng.uniform(1, 12)
        return type("Judge", (ScriptedJudge,), {"fails_at": fails_at, "passes_after_s": after_s})

    def run(self) -> None:
        """Run the schedule; raise AssertionError with the seed if a rollout does not end."""
        world = self.world
        world.run_until(110 + self.rng.uniform(0, 10))
        self._plan_faults()
        self._plan_failover()
        self._keep_starting()
        world.run_until(world.now_s + ENDS_S)
        self._heal()
        world.run_until(world.now_s + 5.0)  # a command given before may still be on its way
        world.run_until(world.now_s + END_MAX_S, self.is_over)
        assert self.is_over(), f"seed={self.seed}: {self.explain()}"
        world.run_until(world.now_s + 40)

    def is_over(self) -> bool:
        """True if every rollout is over, also one that the leader's snapshot alone names.

        No document is known if Redis and every control process have lost their memory.
        """
        leader = self.world.leader()
        if leader is None or leader.core.publisher.published is None:
            return False
        rollouts = leader.core.library.rollouts
        return all(each.is_final for each in rollouts) and not leader.core.content.running_rollout

    def ends(self) -> list[str]:
        """Return the state of each rollout that the leader knows."""
        leader = self.world.leader()
        return [each.state_name for each in leader.core.library.rollouts] if leader is not None else []

    def explain(self) -> str:
        """Return what the control processes think."""
        lines = []
        for control in self.world.controls.values():
            core = control.core
            rollouts = [
                (each.id, each.state_name, each.step, each.waits_for) for each in core.library.rollouts
            ]
            lines.append(f"{control.name} up={control.is_up} {core.leadership} {rollouts}")
        return "\n".join(lines)

    def _keep_starting(self) -> None:
        """Start a rollout as soon as a leader takes the command, and again if the document was lost with everything."""
        world = self.world
        if self.is_quiet:
            return
        leader = world.leader()
        if leader is not None and not leader.core.library.rollouts:
            world.start_rollout(f"r{round(world.now_s)}", self.settings)
        world.after(2.0, self._keep_starting)

    def _plan_faults(self) -> None:
        faults: tuple[Callable[[], None], ...] = (
            self._crash_leader,
            self._crash_leader,
            self._terminate_leader,
            self._crash_peer,
            self._pause,
            self._cut,
            self._redis_down,
            self._flush,
            self._lose_write,
            self._clock_step,
            self._forget_term,
            self._old_document,
            self._abort,
            self._undo,
            self._direct,
            self._pause_rollout,
            self._revert,
            self._freeze,
            self._refuse,
            self._lose_role,
            self._start_another,
            self._old_dump,
        )
        for _ in range(self.rng.randrange(1, 9)):
            self.world.after(self.rng.uniform(0, ENDS_S), self.rng.choice(faults))
        if self.rng.random() < 0.1:
            for minute in range(6):
                self.world.after(15.0 * minute, self._crash_leader)

    def _plan_failover(self) -> None:
        """Once receivers are at one state, chosen by the seed: Redis loses the last writes, and the leader dies."""
        state = self.rng.choice([state for state in RolloutState if state is not RolloutState.NONE])
        is_planned = self.rng.random() < 0.5

        def on_publish(control: Control, snapshot: Published) -> None:
            nonlocal is_planned
            if is_planned and snapshot.content.rollout_state is state:
                is_planned = False
                self.world.after(self.rng.uniform(0.06, 0.2), lambda: self._fail_over(control))

        self.world.on_publish = on_publish

    def _fail_over(self, control: Control) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            self.world.redis.lose_last_write()
        self._crash_control(control)

    def _node(self) -> Node:
        return self.rng.choice([*self.world.controls.values(), *self.world.peers.values()])

    def _crash_leader(self) -> None:
        control = self.world.leader() or self.rng.choice(list(self.world.controls.values()))
        self._crash_control(control)

    def _crash_control(self, control: Control) -> None:
        self.world.crash(control)
        delay_s = self.rng.uniform(0.5, 20)
        self.world.after(delay_s, lambda: None if control.is_up else self.world.start_control(control))

    def _terminate_leader(self) -> None:
        control = self.world.leader()
        if control is not None:
            self.world.terminate(control)
            self.world.after(
                self.rng.uniform(1.1, 20),
                lambda: None if control.is_up else self.world.start_control(control),
            )

    def _crash_peer(self) -> None:
        peer = self.rng.choice(list(self.world.peers.values()))
        self.world.crash(peer)
        delay_s = self.rng.uniform(0.2, 8)
        self.world.after(delay_s, lambda: None if peer.is_up else self.world.start_peer(peer))

    def _pause(self) -> None:
        """A pause is never cut short: what waits for its end would be overtaken by what comes later."""
        node, until_s = self._node(), self.world.now_s + self.rng.uniform(0.5, 15)
        node.paused_until_s = max(node.paused_until_s, until_s)

    def _cut(self) -> None:
        world = self.world
        if self.rng.random() < 0.4:
            node = self._node()
            node.has_redis = False
            world.after(self.rng.uniform(1, 20), lambda: setattr(node, "has_redis", True))
            return
        control = self.rng.choice(list(world.controls))
        names = self.rng.sample(list(world.peers), self.rng.randrange(1, len(world.peers) + 1))
        pairs = {frozenset((control, name)) for name in names}
        world.cut |= pairs
        world.after(self.rng.uniform(1, 25), lambda: world.cut.difference_update(pairs))

    def _redis_down(self) -> None:
        redis = self.world.redis
        redis.is_up = False
        self.world.after(self.rng.uniform(0.5, 20), lambda: setattr(redis, "is_up", True))

    def _flush(self) -> None:
        self.world.redis.flush()

    def _lose_write(self) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            self.world.redis.lose_last_write()

    def _forget_term(self) -> None:
        """Lose the term and the lease, so that two leaders may take one number."""
        self.world.redis.number, self.world.redis.lease = 0, None

    def _old_document(self) -> None:
        """Redis comes back with an old revision of a document."""
        redis = self.world.redis
        if redis.written:
            old = self.rng.choice(redis.written)
            redis.put_back(old)

    def _clock_step(self) -> None:
        control = self.rng.choice(list(self.world.controls.values()))
        control.wall_offset_s += self.rng.choice((-1, 1)) * self.rng.choice((1, 60, 3600, 86400))

    def _abort(self) -> None:
        self.world.change_rollout("abort")

    def _undo(self) -> None:
        """An operator undoes the promotion, once there is one."""
        leader = self.world.leader()
        running = leader.core.library.running if leader is not None else None
        if running is not None and running.state_name == "PROMOTING":
            self.world.change_rollout("undo")
        elif not self.is_quiet:
            self.world.after(2.0, self._undo)

    def _direct(self) -> None:
        """`snapshot stable --direct`: an operator writes the board, whether control processes run or not."""
        redis, peers = self.world.redis, self.world.peers.values()
        if not redis.is_up or redis.board is None:
            return
        applied = [peer.fence.current for peer in peers if peer.is_up]
        numbers = [redis.number, *(each.name.term.number for each in applied if each is not None)]
        snapshot = stable_snapshot(redis.board, numbers, "test", 0)
        redis.number = max(redis.number, snapshot.name.term.number)
        redis.offer(snapshot)

    def _pause_rollout(self) -> None:
        self.world.change_rollout("pause")
        self.world.after(self.rng.uniform(1, 30), self._resume_once)

    def _resume_once(self) -> None:
        self.world.change_rollout("resume")

    def _revert(self) -> None:
        """An operator makes a pool stable between rollouts."""
        self.world.make_stable(self.rng.choice(("stable", "next")))

    def _old_dump(self) -> None:
        """A command about the stable pool, a rollout behind it, then Redis with a dump from between, and new processes."""
        world, leader = self.world, self.world.leader()
        running = leader.core.library.running if leader is not None else None
        if leader is None or running is not None or not leader.core.library.rollouts:
            if not self.is_quiet:
                world.after(2.0, self._old_dump)
            return
        world.make_stable("stable")
        world.after(2.0, self._dump)
        world.after(4.0, self._start_another)

    def _dump(self) -> None:
        dump = self.world.redis.dump()
        self.world.after(self.rng.uniform(20, 60), lambda: self._restore(dump))

    def _restore(self, dump: Dump) -> None:
        if self.is_quiet:
            return
        self.world.redis.restore(dump)
        for control in self.world.controls.values():
            control.copies = Copies()
            self.world.crash(control)
            self.world.start_control(control)

    def _freeze(self) -> None:
        self.world.freeze(self.rng.uniform(1, 60))

    def _refuse(self) -> None:
        """A receiver cannot serve the new version, until it starts again."""
        self.rng.choice(list(self.world.peers.values())).refuses = True

    def _lose_role(self) -> None:
        """A pool has a role no more, for a long time."""
        pool, role = self.rng.choice(("stable", "next")), self.rng.choice(("router", "prefill", "decode"))
        peer = self.world.peers[f"{pool}-{role}-0"]
        self.world.crash(peer)
        delay_s = self.rng.uniform(8, 60)
        self.world.after(delay_s, lambda: None if peer.is_up else self.world.start_peer(peer))

    def _start_another(self) -> None:
        """A rollout to the pool that is not stable, once the first one is over."""
        world, leader = self.world, self.world.leader()
        is_over = (
            leader is not None and bool(leader.core.library.rollouts) and not leader.core.library.running
        )
        if leader is None or not is_over or self.is_quiet:
            if not self.is_quiet:
                world.after(2.0, self._start_another)
            return
        to_pool = "next" if leader.core.content.stable.pool == "stable" else "stable"
        settings = msgspec.structs.replace(self.settings, to_pool=to_pool, baseline_pool="")
        world.start_rollout(f"r{round(world.now_s)}", settings)

    def _heal(self) -> None:
        self.is_quiet = True
        world = self.world
        world.cut.clear()
        world.redis.is_up = True
        self._unfreeze()
        for node in (*world.controls.values(), *world.peers.values()):
            node.has_redis = True
        for control in world.controls.values():
            if not control.is_up or control.is_leaving:
                world.start_control(control)
        for peer in world.peers.values():
            peer.refuses = False
            if not peer.is_up:
                world.start_peer(peer)
        self._resume()

    def _unfreeze(self) -> None:
        """An operator ends a freeze: a clock that was set back makes it longer."""
        if not self.world.freeze(0.0):
            self.world.after(2.0, self._unfreeze)

    def _resume(self) -> None:
        """An operator resumes a paused rollout."""
        leader = self.world.leader()
        running = leader.core.library.running if leader is not None else None
        if running is not None and running.state_name == "PAUSED":
            self.world.change_rollout("resume")
        self.world.after(5.0, self._resume)
