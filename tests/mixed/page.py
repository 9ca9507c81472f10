"""Renders docs/measurements/mixed-engines.md. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bench import pages
from tests.mixed.conversations import CANCELLED, GROUPS, SAMPLED, SYSTEM_TOKENS, TURNS
from tests.mixed.mesh import BLOCK_TOKENS, KV_BLOCKS, POOLS
from tests.mixed.play import PoolResult

HIT_RATIO_MIN: Final = 0.9
"""Least hit ratio of the pool without KV events, as a share of that of the pool with them."""

FREED_MAX_S: Final = 1.0

LEGEND: Final = f"""\
One mesh serves three pools of one model version at once. Every conversation is played in every pool. A conversation has
{TURNS} turns; its first message of {SYSTEM_TOKENS} tokens is shared by one in {GROUPS} conversations. Clients cancel
{CANCELLED:.0%} of the turns after some tokens, and ask again. {SAMPLED:.0%} of the conversations are sampled with a seed.
Each engine has {KV_BLOCKS} blocks of {BLOCK_TOKENS} tokens, which is far less than the conversations need. The engines
without KV events are [an impersonation](../../tests/fakes/stock_backend/__init__.py) of TensorRT-LLM's C++ backend, not
that backend. Each answer is compared with a calculation without a server."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run."""

    pools: Mapping[str, PoolResult]
    freed_s: Mapping[str, list[float]]
    wrong_hits: Mapping[str, float]
    """Prompt tokens that the router expected in the cache of an engine in vain."""

    @property
    def events_share(self) -> float:
        """Hit ratio of the pool without KV events, as a share of that with them."""
        return self.pools["silent"].hit_ratio / max(self.pools["events"].hit_ratio, 1e-9)

    def failures(self) -> list[str]:
        """Return the promises that were not kept, a sentence each."""
        found = []
        for name, each in self.pools.items():
            found += [f"pool {name}: {text}." for text in each.wrong]
            found += [f"pool {name}: {count} errors {text}." for text, count in each.errors.items()]
            late = [seconds for seconds in self.freed_s[name] if seconds > FREED_MAX_S]
            if late:
                found.append(
                    f"pool {name}: {len(late)} cancels did not free the KV within {FREED_MAX_S:g} s."
                )
        if self.events_share < HIT_RATIO_MIN:
            found.append(f"the hit ratio without KV events is {self.events_share:.2f} of that with them.")
        return found


def lines(outcome: Outcome, command: str, seconds: float, machine: Mapping[str, str]) -> list[str]:
    """Return the lines of the page."""
    about = {pool.name: pool.about for pool in POOLS}
    rows = [
        (
            name,
            about[name],
            f"{each.answers:,}",
            f"{each.tokens:,}",
            f"{each.cancelled:,}",
            str(len(each.wrong)),
            str(sum(each.errors.values())),
            f"{each.ended_by_token:,}",
            f"{each.hit_ratio:.1%}",
            f"{outcome.wrong_hits[name] / max(1, each.prompt_tokens):.2%}",
            f"{sorted(outcome.freed_s[name])[len(outcome.freed_s[name]) // 2]:.2f}",
            f"{max(outcome.freed_s[name]):.2f}",
        )
        for name, each in outcome.pools.items()
    ]
    head = (
        *("pool", "engines", "answers", "tokens", "cancelled", "wrong answers", "errors", "ended by a token"),
        *("hit ratio", "wrong hits", "freed after, s: median", "longest"),
    )
    failures = outcome.failures() or ["No promise was broken."]
    return [
        "# Engines with and without KV events in one mesh",
        "",
        *pages.origin(command, seconds, machine),
        *pages.paragraph(LEGEND.replace("\n", " ")),
        "",
        *pages.table(head, rows, "llrrrrrrrrrr"),
        "",
        f"The hit ratio without KV events is **{outcome.events_share:.2f}** of that with them (aim: {HIT_RATIO_MIN:g}).",
        "",
        *pages.items(failures),
        "",
    ]
