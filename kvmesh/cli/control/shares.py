"""Shares of sessions and numbers of tokens on the command line: "5%", "2M". Pure."""

from __future__ import annotations

import re
from typing import Final

from kvmesh.bad_option import BadOption
from kvmesh.snapshot.shadow import PERMILLE, TOKEN_MAX

_SHARE: Final = re.compile(r"([0-9]{1,3})(?:\.([0-9]))?%", re.ASCII)
_TOKENS: Final = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,3}))?([kMG]?)", re.ASCII)
_FACTORS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def sample_permille(option: str, text: str) -> int:
    """Return the thousandths of "5%" or "0.5%". Raises BadOption with the range."""
    allowed = "allowed are 0.1% to 100%, with at most one digit behind the point"
    found = _SHARE.fullmatch(text)
    if found is None:
        raise BadOption(f'{option} = "{text}" is no share: {allowed}.')
    permille = 10 * int(found[1]) + int(found[2] or 0)
    if not 1 <= permille <= PERMILLE:
        raise BadOption(f"{option} = {text} is out of range: {allowed}.")
    return permille


def tokens(option: str, text: str, low: int) -> int:
    """Return the number of "2M", "500k" or "1500". Raises BadOption with the range."""
    allowed = f"allowed are {low} to {TOKEN_MAX}, written like 1500, 500k, 2M or 1G"
    found = _TOKENS.fullmatch(text)
    if found is None:
        raise BadOption(f'{option} = "{text}" is no number of tokens: {allowed}.')
    fraction = found[2] or ""
    number = int(found[1] + fraction) * _FACTORS[found[3]] // int("1" + "0" * len(fraction))
    if not low <= number <= TOKEN_MAX:
        raise BadOption(f"{option} = {text} is out of range: {allowed}.")
    return number
