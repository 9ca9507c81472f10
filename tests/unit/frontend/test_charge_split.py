"""Charges of executions that died, beside one that did not: each token is charged once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.accounts.charge_split import dues
from services.frontend.requests.request_spec import EarlierExecution

PROMPT = 50
POSITIONS = st.integers(0, 1000)


@given(st.lists(POSITIONS, max_size=5), POSITIONS)
def test_executions_from_the_beginning_pay_for_the_longest_of_them(given_by: list[int], output: int) -> None:
    """Executions from the beginning are charged the prompt once, and each position once."""
    earlier = [EarlierExecution(f"o{at}", 0, False, one) for at, one in enumerate(given_by)]
    owed = sum(tokens for _, tokens in dues(earlier, PROMPT, 0, output, is_successor=False))
    assert PROMPT + output + owed == PROMPT + max([output, *given_by])


@given(POSITIONS, POSITIONS, POSITIONS, st.lists(POSITIONS, max_size=3))
def test_a_successor_leaves_its_predecessor_the_tokens_it_gave(
    noted: int, received: int, more: int, others: list[int]
) -> None:
    """A successor is charged only for its own output; its predecessor for the rest.

    The predecessor pays the prompt, the received tokens, and its output beyond the successor's end.
    """
    output = received + more
    earlier = [EarlierExecution("predecessor", 0, True, noted)] + [
        EarlierExecution(f"o{at}", 0, False, one) for at, one in enumerate(others)
    ]
    owed = dict(dues(earlier, PROMPT, received, output, is_successor=True))
    assert sum(owed.values()) + more == PROMPT + max([output, noted, *others])
    assert owed[earlier[0]] >= PROMPT + received


@given(st.integers(1, 1000), POSITIONS, POSITIONS)
def test_an_execution_without_a_progress_report_owes_its_share_alone(
    inherited: int, received: int, output: int
) -> None:
    """Without a progress report, a predecessor owes at most the tokens that the client shows."""
    earlier = [EarlierExecution("o", inherited, True), EarlierExecution("p", 0, False)]
    owed = dict(dues(earlier, PROMPT, received, output, is_successor=True))
    assert owed == {earlier[0]: max(0, received - inherited), earlier[1]: 0}
