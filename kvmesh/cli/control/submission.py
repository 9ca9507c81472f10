"""Sends a writing call, and finds out what --force would override if the call is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.failures import ControlFailed

WOULD_BE_REFUSED: Final = "The command would be refused."


async def submit(client: ControlClient, method: str, request: Any, again: str) -> Any:
    """Send `request` once and return the answer. `again`: the command that shows whether a lost call is in force.

    A request with `validate_only` changes nothing. Raises ControlFailed with the checks that --force would override.
    """
    try:
        answer = await client.write(method, request, again)
    except ControlFailed as failed:
        if not failed.may_be_forced or not _is_forceable(request):
            raise
        raise failed.with_force(await _overridable(client, method, request)) from None
    if _is_forceable(request) and request.validate_only and overridden_of(answer):
        would_fail = ControlFailed((WOULD_BE_REFUSED,), code="FAILED_PRECONDITION")
        raise would_fail.with_force(overridden_of(answer))
    return answer


def overridden_of(answer: Any) -> Sequence[str]:
    """Return the checks that --force overrode, or would override."""
    found = answer.snapshot if "snapshot" in answer.DESCRIPTOR.fields_by_name else answer
    return tuple(found.overridden) if "overridden" in found.DESCRIPTOR.fields_by_name else ()


def _is_forceable(request: Any) -> bool:
    """True if the request has a `force` that is not set."""
    return "force" in request.DESCRIPTOR.fields_by_name and not request.force


async def _overridable(client: ControlClient, method: str, request: Any) -> Sequence[str]:
    """Return the checks that --force would override; empty if it would not help."""
    probe = type(request)()
    probe.CopyFrom(request)
    probe.force, probe.validate_only = True, True
    try:
        return overridden_of(await client.read(method, probe))
    except ControlFailed:
        return ()
