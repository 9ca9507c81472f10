"""The commands against a real gRPC server that answers as a test says: exit status, output, redirects, refusals."""

from __future__ import annotations

import io
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from kvmesh.cli.control import client as client_module
from kvmesh.cli.control import draining, watching
from kvmesh.cli.mesh_file import ListedProcess, MeshFile, write_mesh
from kvmesh.config import MeshConfig, load
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots
from kvmesh.ports import free_ports
from kvmesh.trust.peers import Trust
from tests.certificates import Folder
from tests.patience import quiet_s
from tests.unit.cli.control.messages import receiver, rollout, view
from tests.unit.cli.control.scripted_control import (
    Refusal,
    ScriptedControl,
    Shell,
    redirect,
    register,
    served,
)

NO_CONTROL_PLANE = (
    "No control plane runs in this mesh: set control.replicas = 1, or start one with "
    "`python -m controlplane`.\n"
)
START = ("rollout", "start", "--to", "next", "--baseline", "young")
REFUSED = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "the pool next lacks 2 replicas", "CAPACITY_MISSING")

NO_LEADER = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this process does not lead", "NOT_LEADER")

COMMANDS = (
    START,
    ("rollout", "status"),
    ("rollout", "status", "--watch"),
    ("rollout", "history"),
    ("rollout", "history", "r-1"),
    ("rollout", "pause"),
    ("rollout", "resume"),
    ("rollout", "promote"),
    ("rollout", "abort"),
    ("rollout", "undo"),
    ("rollout", "attest", "evaluation", "pass"),
    ("snapshot", "show"),
    ("snapshot", "history"),
    ("snapshot", "diff"),
    ("snapshot", "revert", "stable"),
    ("snapshot", "receivers"),
    ("snapshot", "stable"),
    ("freeze", "--ttl", "2h"),
    ("replicas", "cordon", "decode-0"),
    ("replicas", "uncordon", "decode-0"),
    ("replicas", "drain", "decode-0", "--wait"),
)
"""Every command that needs a control plane."""


def whole() -> ScriptedControl:
    """Return a control process that has an answer for every command."""
    snapshot, ended = view(), rollout(snapshots.ROLLOUT_STATE_COMPLETED, step=3)
    snapshot.content.cordons.add(process_id="decode-0", draining=True)
    older = view(version=2, canary=0)
    return ScriptedControl(
        StartRollout=pb.StartRolloutResponse(rollout=rollout()),
        GetRollout=pb.GetRolloutResponse(rollout=rollout()),
        ListRollouts=pb.ListRolloutsResponse(rollouts=[rollout()]),
        WatchRollout=lambda _: [rollout(), ended],
        ChangeRollout=pb.ChangeRolloutResponse(rollout=rollout()),
        GetSnapshot=pb.GetSnapshotResponse(snapshot=snapshot),
        ListSnapshots=pb.ListSnapshotsResponse(snapshots=[snapshot, older]),
        RevertSnapshot=pb.RevertSnapshotResponse(snapshot=snapshot),
        ListReceivers=pb.ListReceiversResponse(receivers=[receiver("decode-0", live=0, is_current=True)]),
        Freeze=pb.FreezeResponse(frozen_until=Timestamp(seconds=1_795_428_902)),
        CordonReplica=pb.CordonReplicaResponse(),
        UncordonReplica=pb.UncordonReplicaResponse(was_cordoned=True),
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_without_a_control_plane_each_command_says_so(shell: Shell, words: tuple[str, ...]) -> None:
    """In one sentence, with the exit status of a failure."""
    assert shell.run(*words) == (1, "", NO_CONTROL_PLANE)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_each_command_prints_something_readable_and_json(
    shell: Shell, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with exit status 0 and nothing that looks like a message of protobuf."""
    monkeypatch.setattr(draining, "POLL_S", 0.01)
    with served(whole()) as (address,):
        register(shell.url, address)
        status, shown, errors = shell.run(*words)
        assert (status, errors) == (0, "")
        assert shown.strip() and "{" not in shown
        status, shown, errors = shell.run(*words, "--json")
        assert (status, errors) == (0, "")
        documents = shown.splitlines() if "--watch" in words else [shown]
        assert all(isinstance(json.loads(document), dict) for document in documents)


def test_old_leases_are_ignored(shell: Shell) -> None:
    """A control plane that died is none."""
    register(shell.url, "127.0.0.1:1", is_old=True)
    assert shell.run("rollout", "status") == (1, "", NO_CONTROL_PLANE)


def test_a_control_process_of_the_mesh_that_runs_here_is_found_without_its_lease(shell: Shell) -> None:
    """mesh.json names it while Redis has no lease."""
    with served(whole()) as (address,):
        Path(".kvmesh").mkdir()
        processes = [("redis", shell.url), ("control", address)]
        listed = tuple(
            ListedProcess(name=f"{role}-0", role=role, pid=0, address=at, metrics_address="", log="")
            for role, at in processes
        )
        write_mesh(Path(".kvmesh"), MeshFile(pid=os.getpid(), config="", processes=listed))
        assert shell.run("rollout", "status", "--data-dir", ".kvmesh")[0] == 0


def test_a_process_that_does_not_answer_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mesh serves on, and the operator reads that."""
    monkeypatch.setattr(client_module, "CONNECT_S", 0.3)
    gone = f"127.0.0.1:{next(free_ports('127.0.0.1', 1))}"
    register(shell.url, gone)
    status, _, errors = shell.run("rollout", "status")
    assert status == 1
    assert errors.startswith(f"No control process answers: {gone}: ")
    assert errors.endswith("The mesh serves on with its last snapshot.\n")


def test_the_next_process_is_asked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease outlives its process for some seconds."""
    monkeypatch.setattr(client_module, "CONNECT_S", 0.3)
    with served(whole()) as (address,):
        register(shell.url, "127.0.0.1:1", address)
        assert shell.run("rollout", "pause")[0] == 0


def test_a_follower_names_the_leader(shell: Shell) -> None:
    """The command follows it once."""
    follower, leader = ScriptedControl(), whole()
    with served(follower, leader) as (one, other):
        follower.script(ChangeRollout=redirect(other))
        register(shell.url, one)
        assert shell.run("rollout", "pause")[0] == 0
        assert len(follower.requests) == len(leader.requests) == 1


def test_the_lease_of_the_leader_is_asked_first(shell: Shell) -> None:
    """So a redirect is the exception."""
    follower, leader = whole(), whole()
    with served(follower, leader) as (one, other):
        register(shell.url, one, other, leader=other)
        assert shell.run("rollout", "pause")[0] == 0
        assert (len(follower.requests), len(leader.requests)) == (0, 1)


def test_two_followers_that_name_each_other_end(shell: Shell) -> None:
    """One redirect is followed; the second refusal is printed."""
    one, other = ScriptedControl(), ScriptedControl()
    with served(one, other) as (first, second):
        one.script(ChangeRollout=redirect(second))
        other.script(ChangeRollout=redirect(first))
        register(shell.url, first)
        status, _, errors = shell.run("rollout", "pause")
    assert (status, errors) == (1, "NOT_LEADER: this process does not lead.\n")


def test_each_violation_is_one_sentence(shell: Shell) -> None:
    """With the option in place of the field; programs get the fields."""
    violations = (
        ("settings.to_pool", 'is "nxt"; the known pools are: next, stable'),
        ("steps_percent", "is 5,3; each step must be above the step before it"),
        ("unknown_field", "is x; y is allowed"),
    )
    refusal = Refusal(
        grpc.StatusCode.INVALID_ARGUMENT, "to_pool", "FIELD_OUT_OF_RANGE", violations=violations
    )
    with served(ScriptedControl(StartRollout=refusal)) as (address,):
        register(shell.url, address)
        status, shown, errors = shell.run(*START)
        assert (status, shown) == (1, "")
        assert errors.splitlines() == [
            '--to is "nxt"; the known pools are: next, stable.',
            "--steps is 5,3; each step must be above the step before it.",
            "unknown_field is x; y is allowed.",
        ]
        error = shell.json(*START)["error"]
        assert error["code"] == "INVALID_ARGUMENT"
        assert error["violations"] == dict(violations)


def start_of(request: Any) -> Any:
    """Refuse a start without force; with force answer what it overrides."""
    if not request.force:
        return REFUSED
    return pb.StartRolloutResponse(rollout=rollout(), overridden=["2 replicas are missing"])


def test_a_refusal_says_what_force_would_override(shell: Shell) -> None:
    """The question changes nothing: it only validates."""
    control = ScriptedControl(StartRollout=start_of)
    with served(control) as (address,):
        register(shell.url, address)
        status, shown, errors = shell.run(*START)
        assert (status, shown) == (1, "")
        assert errors.splitlines() == [
            "CAPACITY_MISSING: the pool next lacks 2 replicas.",
            "--force would override: 2 replicas are missing.",
        ]
        assert [(each.force, each.validate_only) for each in control.requests] == [
            (False, False),
            (True, True),
        ]
        assert shell.json(*START)["error"]["force_would_override"] == ["2 replicas are missing"]


def test_a_refusal_that_arrives_shortened_needs_no_repetition(shell: Shell) -> None:
    """The control plane says that force overrides it, so the checks alone are printed."""
    checks = ["2 replicas are missing", f"the judge: {'x' * 300}"]

    def promote(request: Any) -> Any:
        if request.force:
            return pb.ChangeRolloutResponse(rollout=rollout(), overridden=checks)
        text, said = "2 replicas are missing; the ju", {"can_force": "true"}
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, text, "CHANGE_REFUSED", metadata=said)

    with served(ScriptedControl(ChangeRollout=promote)) as (address,):
        register(shell.url, address)
        _, _, errors = shell.run("rollout", "promote")
    assert errors.startswith("Refused: the command needs --force.\n") and "the ju.\n" not in errors


def test_force_says_what_it_overrode(shell: Shell) -> None:
    """The command is done, and its audit entry has the same words."""
    control = ScriptedControl(StartRollout=start_of)
    with served(control) as (address,):
        register(shell.url, address)
        status, shown, errors = shell.run(*START, "--force")
    assert (status, errors) == (0, "Overridden by --force: 2 replicas are missing.\n")
    assert shown.startswith("Started r-1: stable (v1) to next (v2): BAKING")
    assert [each.validate_only for each in control.requests] == [False]


@pytest.mark.parametrize("answer", [start_of, pb.StartRolloutResponse(rollout=rollout(), overridden=["x"])])
def test_a_dry_run_of_a_refused_command_fails(shell: Shell, answer: Any) -> None:
    """Whether the control plane refuses it, or answers what force would override."""
    control = ScriptedControl(StartRollout=answer)
    with served(control) as (address,):
        register(shell.url, address)
        status, shown, errors = shell.run(*START, "--dry-run")
    assert (status, shown) == (1, "")
    assert "--force would override: " in errors
    assert all(each.validate_only for each in control.requests)


def test_a_dry_run_prints_the_result(shell: Shell) -> None:
    """In the conditional."""
    with served(whole()) as (address,):
        register(shell.url, address)
        for words, shown in (
            (START, "Would start r-1"),
            (("rollout", "promote"), "Would promote: r-1"),
            (("snapshot", "revert", "7.control-0/2"), "Would publish the weights of 7.control-0/2"),
            (("replicas", "drain", "decode-0"), "decode-0 would drain"),
            (("replicas", "cordon", "decode-0"), "decode-0 would be cordoned"),
            (("replicas", "uncordon", "decode-0"), "decode-0 would be in use again."),
        ):
            assert shell.run(*words, "--dry-run")[1].startswith(shown)


def test_a_lost_answer_of_a_writing_call_is_not_sent_again(shell: Shell) -> None:
    """A second start could be a second rollout. The sentence names the command that shows the state."""
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "the process shuts down", "")
    one, other = ScriptedControl(StartRollout=lost, GetRollout=lost), whole()
    with served(one, other) as (first, second):
        register(shell.url, first, second)
        status, _, errors = shell.run(*START)
        assert (status, other.requests) == (1, [])
        assert "The command may be in force: `kvmesh rollout status` shows it." in errors
        assert shell.run("rollout", "status")[0] == 0


@pytest.mark.parametrize("count", [0, 1])
def test_a_difference_of_fewer_than_two_snapshots_is_a_failure(shell: Shell, count: int) -> None:
    """Programs get an error object, as from every other command."""
    views = [
        pb.SnapshotView(name=snapshots.SnapshotName(term=snapshots.Term(number=7, leader="c"), version=1))
    ]
    with served(ScriptedControl(ListSnapshots=pb.ListSnapshotsResponse(snapshots=views[:count]))) as (
        address,
    ):
        register(shell.url, address)
        sentence = "There are fewer than two snapshots to compare."
        assert shell.run("snapshot", "diff") == (1, "", f"{sentence}\n")
        assert shell.json("snapshot", "diff") == {"error": {"sentences": [sentence]}}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*START, "--steps", "1,5,3"), "--steps = 1,5,3 has 3 after 5: allowed are"),
        (
            ("rollout", "attest", "evaluation", "maybe"),
            'The result "maybe" is unknown: allowed are pass and fail.',
        ),
        (("rollout", "pause", "--reason", "x" * 201), "--reason has 201 characters: allowed are up to 200."),
        (("rollout", "history", "--count", "0"), "--count = 0 is out of range: allowed are 1 to 100."),
        (("snapshot", "history", "--count", "101"), "--count = 101 is out of range: allowed are 1 to 100."),
        (("snapshot", "revert", ""), "NAME = '' is no name: allowed are 1 to 256 printable bytes."),
        (("freeze",), "Either --ttl or --off is needed: --ttl 2h begins a freeze, --off ends it."),
        (("freeze", "--ttl", "2h", "--off"), "--ttl and --off exclude each other"),
        (("freeze", "--ttl", "25h"), "--ttl = 25h is out of range: allowed are 1s to 24h"),
        (("freeze", "--ttl", "soon"), '--ttl = "soon" is no duration: allowed are 1s to 24h'),
        (("events", "--count", "0"), "--count = 0 is out of range: allowed are 1 to 10000."),
        (("replicas", "cordon", "a\tb"), "NAME = 'a\\tb' is no name: allowed are 1 to 256 printable bytes."),
        (
            ("replicas", "drain", "decode-0", "--wait", "--dry-run"),
            "--wait cannot be combined with --dry-run",
        ),
    ],
)
def test_a_wrong_command_line_is_one_sentence(shell: Shell, words: tuple[str, ...], sentence: str) -> None:
    """With exit status 2, before any control process is asked."""
    status, shown, errors = shell.run(*words)
    assert (status, shown) == (2, "")
    assert sentence in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [("rollout", "begin"), ("rollout", "start"), ("snapshot", "diff", "a", "b", "c")]
)
def test_an_unknown_command_or_a_missing_option_is_a_wrong_command_line(
    shell: Shell, words: tuple[str, ...]
) -> None:
    """The exit status is 2."""
    assert shell.run(*words)[0] == 2


def test_a_snapshot_that_is_not_kept_is_refused_with_the_range(shell: Shell) -> None:
    """The range is that of `snapshot history`."""
    with served(whole()) as (address,):
        register(shell.url, address)
        status, _, errors = shell.run("snapshot", "diff", "9.control-0/1")
    assert status == 2
    assert errors == (
        'A = "9.control-0/1" is no kept snapshot: allowed are the 2 of `kvmesh snapshot history`, '
        "7.control-0/2 to 7.control-0/3.\n"
    )


def test_receivers_that_are_behind_are_a_failure(shell: Shell) -> None:
    """For scripts that wait for a snapshot."""
    found = [receiver("decode-0", is_current=True), receiver("decode-1", version=2, rejection="no such pool")]
    control = ScriptedControl(ListReceivers=pb.ListReceiversResponse(receivers=found))
    with served(control) as (address,):
        register(shell.url, address)
        status, shown, _ = shell.run("snapshot", "receivers")
    assert status == 1
    assert "behind" in shown and "no such pool" in shown


def test_the_end_of_a_freeze_is_a_duration_of_0(shell: Shell) -> None:
    """`--off` is that."""
    control = ScriptedControl(Freeze=pb.FreezeResponse())
    with served(control) as (address,):
        register(shell.url, address)
        assert shell.run("freeze", "--off")[:2] == (0, "The freeze is over: rollouts go forward again.\n")
        assert shell.run("freeze", "--off", "--dry-run")[1].startswith("The freeze would be over")
    assert [(each.ttl.seconds, each.validate_only) for each in control.requests] == [(0, False), (0, True)]


def test_a_dry_run_of_a_freeze_prints_its_end(shell: Shell) -> None:
    """In the conditional."""
    control = whole()
    with served(control) as (address,):
        register(shell.url, address)
        assert shell.run("freeze", "--ttl", "2h", "--dry-run")[1].startswith("Would freeze until ")
    assert [(each.ttl.seconds, each.validate_only) for each in control.requests] == [(7200, True)]


# The watch of a rollout.


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (snapshots.ROLLOUT_STATE_COMPLETED, 0),
        (snapshots.ROLLOUT_STATE_ROLLED_BACK, 1),
        (snapshots.ROLLOUT_STATE_ABORTED, 1),
    ],
)
def test_a_watch_ends_with_the_rollout(shell: Shell, state: Any, status: int) -> None:
    """In a pipe with one line per change; the exit status says how it ended."""
    states = [rollout(step=1), rollout(step=1, baked_s=5), rollout(), rollout(state, reason="the end")]
    with served(ScriptedControl(WatchRollout=lambda _: states)) as (address,):
        register(shell.url, address)
        found, shown, errors = shell.run("rollout", "status", "--watch")
    assert (found, errors) == (status, "")
    assert [line.split(": ")[2].split(",")[0] for line in shown.splitlines()] == [
        *("BAKING", "BAKING"),
        snapshots.RolloutState.Name(state).removeprefix("ROLLOUT_STATE_"),
    ]


def test_a_watch_survives_a_change_of_the_leader(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and goes on with the same rollout at the next leader."""
    monkeypatch.setattr(watching, "RETRY_S", 0.01)
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "the process shuts down", "")
    ended = rollout(snapshots.ROLLOUT_STATE_COMPLETED)
    old, new = ScriptedControl(), ScriptedControl(WatchRollout=lambda _: [rollout(step=3), ended])
    with served(old, new) as (first, second):
        old.script(WatchRollout=[lambda _: [rollout(), lost], lost, NO_LEADER, redirect(second)])
        register(shell.url, first)
        status, shown, _ = shell.run("rollout", "status", "--watch")
    assert status == 0
    lines = shown.splitlines()
    assert lines[1] == (f"The connection to {first} is lost; the mesh serves on. Looking for the leader.")
    assert lines[2] == f"Connected to {second}, the leader."
    assert "step 3" in lines[3]
    assert [each.rollout for each in new.requests] == ["r-1"]


def test_a_silent_leader_counts_as_lost(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout comes each second; a frozen process sends nothing and keeps its connection."""
    monkeypatch.setattr(client_module, "SILENCE_S", 0.3)
    monkeypatch.setattr(watching, "RETRY_S", 0.01)
    released = threading.Event()

    def frozen() -> Any:
        yield rollout()
        released.wait(20)

    ended = rollout(snapshots.ROLLOUT_STATE_COMPLETED)
    control = ScriptedControl(WatchRollout=[lambda _: frozen(), lambda _: [ended]])
    with served(control) as (address,):
        register(shell.url, address)
        status, shown, _ = shell.run("rollout", "status", "--watch")
        released.set()
    assert status == 0
    assert "is lost" in shown


def test_a_watch_of_an_unknown_rollout_fails_at_once(shell: Shell) -> None:
    """Only outages are waited for."""
    refusal = Refusal(grpc.StatusCode.NOT_FOUND, 'there is no rollout "r-9"', "NOT_FOUND")
    with served(ScriptedControl(WatchRollout=refusal)) as (address,):
        register(shell.url, address)
        assert shell.run("rollout", "status", "r-9", "--watch")[0] == 1


def test_ctrl_c_ends_a_watch_with_130(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual status of an interrupt."""
    shown = watching.Lines.state

    def interrupt(self: watching.Lines, state: pb.Rollout) -> None:
        shown(self, state)
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.Lines, "state", interrupt)
    with served(ScriptedControl(WatchRollout=lambda _: [rollout()])) as (address,):
        register(shell.url, address)
        status, output, errors = shell.run("rollout", "status", "--watch")
    assert (status, errors) == (130, "")
    assert output.startswith("r-1: ")


def test_on_a_terminal_the_screen_is_replaced_in_place() -> None:
    """The last state stays on it, and a note about the connection stands below the state."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with watching.Screen(console) as shown:
        shown.note("nothing is shown yet")
        shown.state(rollout(step=1))
        shown.note("The connection is lost.")
        shown.state(rollout(step=2))
    text = out.getvalue()
    assert "The connection is lost." in text
    assert "nothing is shown yet" not in text
    last = text.rpartition("\x1b[2K")[2]
    assert "[50 %]" in last and "The connection is lost." not in last


def test_a_display_follows_the_output() -> None:
    """A screen on a terminal, lines in a pipe, objects for programs."""
    terminal, pipe = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    assert isinstance(watching.display(terminal, pipe, as_json=False), watching.Screen)
    assert isinstance(watching.display(pipe, pipe, as_json=False), watching.Lines)
    assert isinstance(watching.display(terminal, pipe, as_json=True), watching.JsonLines)


def test_a_sentence_is_one_line_on_a_narrow_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts read lines, and a pipe has no width."""
    monkeypatch.setenv("COLUMNS", "40")
    with served(whole()) as (address,):
        register(shell.url, address)
        assert len(shell.run("replicas", "cordon", "decode-0")[1].splitlines()) == 1


# TLS.


def tls(config: MeshConfig, role: str) -> grpc.ServerCredentials:
    found = Trust(config, role).server_credentials()
    assert found is not None
    return found.grpc_credentials()


def test_with_trust_the_operator_and_the_control_process_know_each_other(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with another role's certificate is no control process."""
    monkeypatch.setattr(client_module, "CONNECT_S", 1.0)
    folder = Folder(tmp_path / "certs")
    lines = [f'{key} = "{value}"' for key, value in folder.section().items()]
    Path("kvmesh.toml").write_text("\n".join(["[trust]", *lines]) + "\n")
    config = load(Path("kvmesh.toml"))
    with served(whole(), credentials=tls(config, "control")) as (address,):
        register(shell.url, address)
        assert shell.run("rollout", "pause")[0] == 0
    with served(whole(), credentials=tls(config, "router")) as (address,):
        register(shell.url, address)
        status, _, errors = shell.run("rollout", "pause")
    assert status == 1
    assert errors.startswith(f"No control process answers: {address}: ")
    assert "control" in errors.partition(address)[2]


# A drain that is waited for.


def test_a_drain_is_waited_for(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command over the snapshot to the last request, with each change on stderr."""
    monkeypatch.setattr(draining, "POLL_S", 0.01)
    plain, drained = view(version=2), view(version=3)
    drained.content.cordons.add(process_id="decode-0", draining=True)
    lists = [receiver("decode-0", 2, 7), receiver("decode-0", 2, 7), receiver("decode-0", 3, 2)]
    lists += [receiver("decode-0", 3, 0), receiver("decode-0", 3, 1), receiver("decode-0", 3, 0)]
    control = ScriptedControl(
        CordonReplica=pb.CordonReplicaResponse(),
        GetSnapshot=[pb.GetSnapshotResponse(snapshot=each) for each in (plain, drained)],
        ListReceivers=[pb.ListReceiversResponse(receivers=[each]) for each in lists],
    )
    with served(control) as (address,):
        register(shell.url, address)
        status, shown, errors = shell.run("replicas", "drain", "decode-0", "--wait")
    assert status == 0
    assert shown.splitlines()[-1] == "decode-0 is empty."
    assert errors.splitlines() == [
        "decode-0 waits for a snapshot with the drain.",
        "decode-0 waits until the process has the snapshot.",
        "decode-0 drains: 2 live requests.",
        "decode-0 drains: 1 live request.",
    ]


def test_a_drain_that_is_taken_back_meanwhile_fails(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another operator put the process into use again."""
    monkeypatch.setattr(draining, "POLL_S", 0.01)
    drained = view()
    drained.content.cordons.add(process_id="decode-0", draining=True)
    control = ScriptedControl(
        CordonReplica=pb.CordonReplicaResponse(),
        GetSnapshot=[pb.GetSnapshotResponse(snapshot=each) for each in (drained, view(version=4))],
        ListReceivers=pb.ListReceiversResponse(receivers=[receiver("decode-0", 4, 3)]),
    )
    with served(control) as (address,):
        register(shell.url, address)
        status, shown, _ = shell.run("replicas", "drain", "decode-0", "--wait")
    assert status == 1
    assert shown.splitlines()[-1] == "decode-0 was put into use again."


def test_help_can_be_read_by_a_stranger(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the control plane has a sentence, and each option one."""
    groups = ((), ("rollout",), ("snapshot",), ("replicas",))
    for group in groups:
        _, shown, _ = shell.run(*group, "--help")
        commands = re.findall(r"(?m)^│ ([a-z]+) +(\S.*?) *│$", shown.partition("Commands")[2])
        assert len(commands) >= 6
        assert all(sentence[0].isupper() for _, sentence in commands)


def test_no_command_takes_long_to_find_no_control_plane(shell: Shell) -> None:
    """One reading of Redis."""
    began_s = quiet_s()
    shell.run("rollout", "status")
    assert quiet_s() - began_s < 5
