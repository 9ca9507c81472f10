"""What executions that died are charged beside one that did not: each token once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.accounts.charge_split import dues
from services.frontend.requests.request_spec import EarlierExecution

PROMPT = 50
POSITIONS = st.integers(0, 1000)


@given(st.lists(POSITIONS, max_size=5), POSITIONS)
def test_executions_from_the_beginning_pay_for_the_longest_of_them(given_by: list[int], output: int) -> None:
    """However many died: the prompt once, and each position that any of them gave once."""
    earlier = [EarlierExecution(f"o{at}", 0, False, one) for at, one in enumerate(given_by)]
    owed = sum(tokens for _, tokens in dues(earlier, PROMPT, 0, output, is_successor=False))
    assert PROMPT + output + owed == PROMPT + max([output, *given_by])


@given(POSITIONS, POSITIONS, POSITIONS, st.lists(POSITIONS, max_size=3))
def test_an_heir_leaves_its_giver_what_it_gave(
    noted: int, received: int, more: int, others: list[int]
) -> None:
    """The giver pays the prompt, the received tokens and what it gave beyond the heir's end; the heir pays the rest."""
    output = received + more
    earlier = [EarlierExecution("predecessor", 0, True, noted)] + [
        EarlierExecution(f"o{at}", 0, False, one) for at, one in enumerate(others)
    ]
    owed = dict(dues(earlier, PROMPT, received, output, is_successor=True))
    assert sum(owed.values()) + more == PROMPT + max([output, noted, *others])
    assert owed[earlier[0]] >= PROMPT + received


@given(st.integers(1, 1000), POSITIONS, POSITIONS)
def test_an_execution_without_a_note_owes_its_giver_share_alone(
    inherited: int, received: int, output: int
) -> None:
    """As before there were notes: nothing, or the part that the client shows."""
    earlier = [EarlierExecution("o", inherited, True), EarlierExecution("p", 0, False)]
    owed = dict(dues(earlier, PROMPT, received, output, is_successor=True))
    assert owed == {earlier[0]: max(0, received - inherited), earlier[1]: 0}
