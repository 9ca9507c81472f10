"""The commands that wait at a leader: their order, and room for those that move traffic back."""

from __future__ import annotations

import pytest

from controlplane.command_queue import COMMANDS_MAX, Author, Command, CommandQueue
from controlplane.library import Document
from controlplane.rollouts.commands import CommandRefused


def never(_: float) -> Document:
    """Make no document: the queue does not run commands."""
    raise AssertionError


def command(ticket: int, *, is_back: bool = False) -> Command:
    """Return a command that waits."""
    return Command(ticket, "pause", "r1", Author(), never, is_back=is_back)


def test_commands_that_move_traffic_back_have_room_in_a_full_queue() -> None:
    """A flood of other commands keeps no operator from an abort, and both have a bound."""
    queue = CommandQueue()
    for ticket in range(COMMANDS_MAX):
        queue.add(command(ticket))
    with pytest.raises(CommandRefused, match=f"^{COMMANDS_MAX} commands wait already"):
        queue.add(command(COMMANDS_MAX))
    for ticket in range(COMMANDS_MAX, 2 * COMMANDS_MAX):
        queue.add(command(ticket, is_back=True))
    with pytest.raises(CommandRefused, match=f"^{2 * COMMANDS_MAX} commands wait already"):
        queue.add(command(2 * COMMANDS_MAX, is_back=True))
    assert [each.ticket for each in queue.clear()] == list(range(2 * COMMANDS_MAX))
    assert queue.take(only_back=False) is None


def test_commands_leave_in_the_order_of_their_arrival() -> None:
    """With `only_back`, those that move traffic back pass the others, which stay in their order."""
    queue = CommandQueue()
    for ticket, is_back in ((1, False), (2, True), (3, False), (4, True)):
        queue.add(command(ticket, is_back=is_back))
    taken = [queue.take(only_back=each) for each in (True, False, True, True, False, False)]
    assert [each.ticket if each is not None else 0 for each in taken] == [2, 1, 4, 0, 3, 0]
