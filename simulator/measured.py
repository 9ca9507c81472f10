"""Prefill costs on a running mesh, as one of its routers has learnt them. Pure.

A router fits one set of coefficients to all prompts (cost_model.py of the router). Replicas that differ from the median one
have a factor (speeds.py of the router). Simulated replicas are alike: each is the median one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvmesh.bad_option import BadOption
from kvmesh.router.v1 import router_pb2 as pb
from services.router.placement.cost_model import WINDOW
from simulator.cost import Cost

PROMPTS_MIN: Final = WINDOW
"""The window of the fit. With fewer prompts the fit depends on the router's prior, and the factors on the first replica."""

DIGITS: Final = 6
"""Significant digits of a coefficient. The simulation uses exactly the printed values."""

BEYOND: Final = 1.25
"""The fit is trusted up to this many times the longest measured prompt."""

FACTORS_SHOWN_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Measured coefficients, and the observations behind them."""

    router: str
    address: str
    cost: Cost
    prompts: int
    """Prompts measured since the router started, or last discarded its estimates."""
    fitted: int
    """Prompts in the fit, the most recent ones."""
    uncached_tokens: tuple[int, int]
    """Fewest and most uncached tokens of a prompt in the fit."""
    factors: Mapping[str, float]
    """Prefill replicas that are slower or faster than the usual one, with their factor on the prefill time."""

    def sentences(self, longest_tokens: int) -> list[str]:
        """Return sentences that describe the costs, for a trace with a longest prompt of `longest_tokens`."""
        fewest, most = self.uncached_tokens
        window = f"the last {self.fitted:,}, of {fewest:,} to {most:,} uncached tokens"
        known = f"{self.router} at {self.address} has measured {self.prompts:,} prompts"
        sentences = [f"{known}. By {window}: --cost={_text(self.cost)}"]
        if longest_tokens > BEYOND * most:
            sentences.append(
                f"The trace has prompts of up to {longest_tokens:,} tokens: the cost of more than {most:,} is a guess."
            )
        if self.factors:
            farthest = sorted(self.factors.items(), key=lambda one: -max(one[1], 1 / one[1]))
            listed = ", ".join(f"{name} {factor:.2f}" for name, factor in farthest[:FACTORS_SHOWN_MAX])
            more = len(farthest) - FACTORS_SHOWN_MAX
            listed += f", and {more} more" if more > 0 else ""
            sentences.append(
                f"All replicas are simulated as usual ones. These take longer or shorter by a factor: {listed}."
            )
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON. The coefficients are in the rows."""
        return {
            "router": self.router,
            "address": self.address,
            "prompts": self.prompts,
            "fitted_prompts": self.fitted,
            "uncached_tokens": list(self.uncached_tokens),
            "factors": dict(self.factors),
        }


def measured(option: str, address: str, status: pb.GetStatusResponse, base: Cost) -> MeasuredCost:
    """Return the costs learnt by the router at `address`. `base` supplies the other values. Raises BadOption."""
    if not status.HasField("prefill_costs"):
        raise BadOption(
            f'{option} = "{address}": {status.router} is of a release that does not report prefill costs.'
        )
    costs = status.prefill_costs
    if costs.measured_prompt_count < PROMPTS_MIN:
        raise BadOption(
            f'{option} = "{address}": {status.router} has measured {costs.measured_prompt_count} prompts since it started '
            f"or last discarded its estimates; {PROMPTS_MIN} are needed. Let it serve more, or use --cost."
        )
    c0_s, a_s, b_s = (float(f"{value:.{DIGITS}g}") for value in (costs.c0_s, costs.a_s, costs.b_s))
    return MeasuredCost(
        router=status.router,
        address=address,
        cost=Cost(
            f"{status.router} measured it",
            c0_s,
            a_s,
            b_s,
            slo_floor_s=base.slo_floor_s,
            kv_bytes=base.kv_bytes,
        ),
        prompts=costs.measured_prompt_count,
        fitted=costs.fitted_prompt_count,
        uncached_tokens=(costs.uncached_tokens_min, costs.uncached_tokens_max),
        factors={
            view.replica: view.prefill_factor
            for view in status.replicas
            if view.role == pb.ReplicaView.ROLE_PREFILL and view.prefill_factor not in (0.0, 1.0)
        },
    )


def _text(cost: Cost) -> str:
    return ",".join(f"{value:.{DIGITS}g}" for value in (cost.c0_s, cost.a_s, cost.b_s))
