"""The metadata with API key and tenant of a client."""

from __future__ import annotations

from functools import partial

import pytest

from kvmesh.client import Client


@pytest.mark.parametrize("wrong", ["two words", "line\nbreak", "ключ", "\x00"])
async def test_a_key_that_does_not_fit_a_header_is_refused_and_not_quoted(wrong: str) -> None:
    """The constructor raises, and the text of the error may go to a log."""
    for option, make in (
        ("key", partial(Client, ["127.0.0.1:1"], key=wrong)),
        ("tenant", partial(Client, ["127.0.0.1:1"], tenant=wrong)),
    ):
        with pytest.raises(ValueError, match=f"{option} does not fit a header") as caught:
            make()
        assert wrong not in str(caught.value)
