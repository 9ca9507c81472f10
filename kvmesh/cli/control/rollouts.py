"""`kvmesh rollout`: starts, shows and changes rollouts through the control plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console

from kvmesh.cli.control import rollout_text as text
from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.output import as_dict, local_time, print_json, say_overridden, show
from kvmesh.cli.control.rollout_tables import history_table, report, status_screen
from kvmesh.cli.control.submission import overridden_of, submit
from kvmesh.cli.control.watching import display, watch
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.control.v1 import control_pb2 as pb

SHOWN_BY: Final = "kvmesh rollout status"

_CHANGES: Final = {
    "pause": pb.ChangeRolloutRequest.CHANGE_PAUSE,
    "resume": pb.ChangeRolloutRequest.CHANGE_RESUME,
    "promote": pb.ChangeRolloutRequest.CHANGE_PROMOTE,
    "abort": pb.ChangeRolloutRequest.CHANGE_ABORT,
    "undo": pb.ChangeRolloutRequest.CHANGE_UNDO,
    "attest": pb.ChangeRolloutRequest.CHANGE_ATTEST,
}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a rollout, as it was given."""

    kind: str
    """A command: "pause", "resume", "promote", "abort", "undo" or "attest"."""
    rollout: str = ""
    reason: str = ""
    requirement: str = ""
    passed: bool = False
    by: str = ""
    force: bool = False
    dry_run: bool = False

    def request(self) -> pb.ChangeRolloutRequest:
        """Return the request."""
        return pb.ChangeRolloutRequest(
            change=_CHANGES[self.kind],
            rollout=self.rollout,
            requirement=self.requirement,
            passed=self.passed,
            by=self.by,
            reason=self.reason,
            force=self.force,
            validate_only=self.dry_run,
        )


async def start(
    mesh: FoundMesh, settings: pb.RolloutSettings, *, force: bool, dry_run: bool, as_json: bool
) -> int:
    """Start a rollout, or check the start."""
    request = pb.StartRolloutRequest(settings=settings, force=force, validate_only=dry_run)
    async with ControlClient(mesh) as client:
        answer = await submit(client, "StartRollout", request, SHOWN_BY)
    done = "Would start" if dry_run else "Started"
    _report(answer, f"{done} {text.headline(answer.rollout)}.", force=force, as_json=as_json)
    if not as_json and not dry_run:
        show("`kvmesh rollout status --watch` follows it.")
    return 0


async def change(mesh: FoundMesh, given: Change, *, as_json: bool) -> int:
    """Change the running rollout, or check the change."""
    async with ControlClient(mesh) as client:
        answer = await submit(client, "ChangeRollout", given.request(), SHOWN_BY)
    done = f"Would {given.kind}" if given.dry_run else f"{given.kind.capitalize()} is in force"
    _report(answer, f"{done}: {text.headline(answer.rollout)}.", force=given.force, as_json=as_json)
    return 0


async def status(mesh: FoundMesh, name: str, *, as_json: bool) -> int:
    """Print one rollout."""
    async with ControlClient(mesh) as client:
        answer = await client.read("GetRollout", pb.GetRolloutRequest(rollout=name))
    if as_json:
        print_json(as_dict(answer.rollout))
    else:
        show(status_screen(answer.rollout, local_time))
    return 0


async def follow(mesh: FoundMesh, name: str, *, as_json: bool) -> int:
    """Follow a rollout to its end; return 0 if it was promoted, 1 if it was taken back."""
    async with ControlClient(mesh) as client:
        return await watch(client, name, display(Console(), Console(stderr=True), as_json=as_json))


async def history(mesh: FoundMesh, name: str, count: int, *, as_json: bool) -> int:
    """Print the last rollouts, or the report of one."""
    async with ControlClient(mesh) as client:
        if name:
            found = (await client.read("GetRollout", pb.GetRolloutRequest(rollout=name))).rollout
        else:
            found = await client.read("ListRollouts", pb.ListRolloutsRequest(page_size=count))
    if as_json:
        print_json(as_dict(found))
    elif name:
        show(report(found, local_time))
    elif found.rollouts:
        show(history_table(found.rollouts, local_time))
    else:
        show("No rollout has run in this mesh.")
    return 0


def _report(
    answer: pb.StartRolloutResponse | pb.ChangeRolloutResponse, sentence: str, *, force: bool, as_json: bool
) -> None:
    say_overridden(overridden_of(answer), is_forced=force)
    if as_json:
        print_json(as_dict(answer))
    else:
        show(sentence)
