"""Who a client says it is."""

from __future__ import annotations

from functools import partial

import pytest

from kvmesh.client import Client


@pytest.mark.parametrize("wrong", ["two words", "line\nbreak", "ключ", "\x00"])
async def test_a_key_that_no_header_holds_is_refused_and_not_quoted(wrong: str) -> None:
    """At once, and the text of the error can go to a log."""
    for option, make in (
        ("key", partial(Client, ["127.0.0.1:1"], key=wrong)),
        ("tenant", partial(Client, ["127.0.0.1:1"], tenant=wrong)),
    ):
        with pytest.raises(ValueError, match=f"{option} does not fit a header") as caught:
            make()
        assert wrong not in str(caught.value)
