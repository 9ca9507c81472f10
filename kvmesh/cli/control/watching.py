"""`kvmesh rollout status --watch`: follows a rollout to its end, over changes of the leader."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console
from rich.live import Live

from kvmesh.cli.control import rollout_text as text
from kvmesh.cli.control.client import ControlClient, ControlLost
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.output import as_dict, local_time
from kvmesh.cli.control.rollout_tables import TimeText, status_screen
from kvmesh.control.v1 import control_pb2 as pb

RETRY_S: Final = 0.5
"""Pause before the next search for a control process."""

_REFRESHES_PER_S: Final = 4


class Display(Protocol):
    """The place where a followed rollout is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def state(self, rollout: pb.Rollout) -> None:
        """Show the present state."""

    def note(self, sentence: str) -> None:
        """Show what happened to the connection. Empty: it is well."""


class _Base:
    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Lines(_Base):
    """Shows one line per change, for a pipe."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._shown: object = None

    def state(self, rollout: pb.Rollout) -> None:
        key = text.change_key(rollout)
        if key != self._shown:
            self._shown = key
            self._print(text.plain_line(rollout))

    def note(self, sentence: str) -> None:
        if sentence:
            self._print(sentence)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class JsonLines(_Base):
    """Writes each state as a JSON object in a line. Notes go to `errors`."""

    def __init__(self, console: Console, errors: Console) -> None:
        super().__init__(console)
        self._errors = errors

    def state(self, rollout: pb.Rollout) -> None:
        line = json.dumps(as_dict(rollout), ensure_ascii=False)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def note(self, sentence: str) -> None:
        if sentence:
            self._errors.print(sentence, markup=False, highlight=False, soft_wrap=True)


class Screen(_Base):
    """Shows the whole state in place, on a terminal. The last state stays on the screen."""

    def __init__(self, console: Console, time_text: TimeText = local_time) -> None:
        super().__init__(console)
        self._time_text = time_text
        self._rollout: pb.Rollout | None = None
        self._live = Live(console=console, refresh_per_second=_REFRESHES_PER_S, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def state(self, rollout: pb.Rollout) -> None:
        self._rollout = rollout
        self._live.update(status_screen(rollout, self._time_text))

    def note(self, sentence: str) -> None:
        if self._rollout is not None:
            self._live.update(status_screen(self._rollout, self._time_text, sentence), refresh=True)


def display(console: Console, errors: Console, *, as_json: bool) -> Display:
    """Return the display for this output."""
    if as_json:
        return JsonLines(console, errors)
    return Screen(console) if console.is_terminal else Lines(console)


async def watch(client: ControlClient, rollout: str, shown: Display) -> int:
    """Follow a rollout to its end; return 0 if it was promoted, 1 if it was taken back.

    Raises ControlFailed if no control process answers at the beginning. Later outages are shown, and waited for.
    """
    follower = _Follower(client, rollout, shown)
    with shown:
        while (ended := await follower.follow()) is None:
            await asyncio.sleep(RETRY_S)
    return text.exit_status(ended)


class _Follower:
    """Follows one rollout over several connections."""

    def __init__(self, client: ControlClient, rollout: str, shown: Display) -> None:
        self._client = client
        self._rollout = rollout
        self._shown = shown
        self._address = ""
        self._is_lost = False

    async def follow(self) -> pb.Rollout | None:
        """Show the states of one connection. Return the last state; None if the connection broke before the end."""
        last = None
        try:
            async with aclosing(self._client.follow(self._rollout)) as states:
                async for address, last in states:
                    self._take(address, last)
                    if text.is_over(last):
                        return last
        except ControlLost:
            pass
        except ControlFailed as failed:
            if not self._address or not failed.is_outage:
                raise
        self._lose()
        return None

    def _take(self, address: str, state: pb.Rollout) -> None:
        if self._is_lost or self._address not in ("", address):
            self._shown.note(f"Connected to {address}, the leader.")
        self._address, self._is_lost = address, False
        self._rollout = state.rollout  # a later rollout is not the watched one
        self._shown.state(state)

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            place = self._address or "the control plane"
            self._shown.note(
                f"The connection to {place} is lost; the mesh serves on. Looking for the leader."
            )
