"""Which execution of a request pays for what: the part that the scripts of executions and settlement have in common.

Pure: text, and what comes of it. Of a request with one execution nothing of this is kept.

An heir goes on behind output that an earlier execution gave; that and the prompt are the earlier one's to pay, whenever it
reports. So an heir that reports first leaves them for it, and what is left for somebody is his alone. An execution that
never reports has died: what was left for it is what its reservation is charged (see Earlier).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Earlier:
    """An execution of the request that has not reported, as the one that begins after it hears of it."""

    owner: str
    """Empty: nobody asked for its number, so its reservation has the name of the request."""
    inherited: int
    """Output that it began behind, and so does not pay."""
    is_giver: bool
    """True if it gave the output that the one after it goes on behind."""
    given: int = 0
    """Output below this position is known to have been given by it; 0: it told nothing (see progress_notes)."""


def dues(
    earlier: Iterable[Earlier], prompt_tokens: int, received: int, output_tokens: int, *, is_heir: bool
) -> list[tuple[Earlier, int]]:
    """Return what each of `earlier` is charged at most if it has died, beside a later execution of the request.

    That one went on behind `received` tokens and came to `output_tokens`. An heir leaves the prompt and the received
    tokens to their giver; any other pays from the beginning. What an earlier one gave beyond is its own, each token once.
    """
    found, reach = list[tuple[Earlier, int]](), output_tokens
    for each in sorted(earlier, key=lambda one: one.given):
        tokens = max(0, each.given - max(reach, each.inherited))
        if is_heir and each.is_giver:
            tokens += max(0, (0 if each.inherited else prompt_tokens) + received - each.inherited)
        reach = max(reach, each.given)
        found.append((each, tokens))
    return found


RUNS: Final = """
-- The executions by epoch, each of them: owner; epoch; output that it went on behind; epoch of who gave that; 1 if it has
-- reported; tokens of prompt and output that it paid, or if it has not reported, that are left for it; and that its report
-- added. `owner` is who began last, `settler` who reported last: an older release notes no more.
local OWNER, EPOCH, FROM, GIVER, TOLD, PROMPT, OUTPUT, PROMPT_MORE, OUTPUT_MORE = 1, 2, 3, 4, 5, 6, 7, 8, 9
local function runs_of(text, epoch, owner, settler, prompt, output)
  local runs, name = text and cjson.decode(text) or {}, owner or settler
  if not name then return runs end
  for _, run in ipairs(runs) do
    if run[OWNER] == name then return runs end
  end
  local told = name == settler and 1 or 0
  prompt, output = told * tonumber(prompt or '0'), told * tonumber(output or '0')
  runs[#runs + 1] = {name, tonumber(epoch or '0'), 0, -1, told, prompt, output, prompt, output}
  return runs
end

local function insert(runs, owner, epoch, from, giver)
  local at = #runs + 1
  while at > 1 and runs[at - 1][EPOCH] > epoch do at = at - 1 end
  table.insert(runs, at, {owner, epoch, from, giver, 0, 0, 0, 0, 0})
  return at
end

-- Who gave output and asked for no number has no name: '' until it reports.
local function ensure_giver(runs, giver)
  if giver >= 0 and not (runs[1] and runs[1][EPOCH] <= giver) then insert(runs, '', giver, 0, -1) end
end
"""
