"""A shadow as an operator ordered it, part of the desired document. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from kvmesh.snapshot import shadow as shadow_traffic
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.shadow import Shadow, ShadowMode

MODES: Final = {mode.name: mode for mode in ShadowMode}


class ShadowOrder(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Unknown keys are ignored, because a later release may write more."""

    id: str
    to_pool: str
    to_version: str
    stable_version: str
    baseline_pool: str = ""
    sample_permille: int = 0
    mode: str = ShadowMode.FULL.name
    first_tokens: int = 0
    token_max: int = 0
    tokens_per_minute_max: int = 0
    expires_s: float = 0.0
    """Wall clock, Unix seconds."""
    keeps_tokens: bool = False
    rollout: str = ""
    started_s: float = 0.0
    """Wall clock, Unix seconds."""
    by: str = ""
    """Operator that asked for it."""

    @property
    def shadow_mode(self) -> ShadowMode:
        """Part of each answer that is copied. An unknown one counts as FULL."""
        return MODES.get(self.mode, ShadowMode.FULL)

    @property
    def is_aa(self) -> bool:
        """True if the target has the stable version (A/A): its differences are the noise of the engines."""
        return self.to_version == self.stable_version

    def shadow(self) -> Shadow:
        """Return the shadow as a snapshot has it."""
        return Shadow(
            id=self.id,
            to_pool=self.to_pool,
            baseline_pool=self.baseline_pool,
            sample_permille=self.sample_permille,
            mode=self.shadow_mode,
            first_tokens=self.first_tokens,
            token_max=self.token_max,
            tokens_per_minute_max=self.tokens_per_minute_max,
            expires_ms=round(1000 * self.expires_s),
            keeps_tokens=self.keeps_tokens,
            rollout=self.rollout,
        )


def shadows_in(content: Content, order: ShadowOrder | None) -> tuple[Shadow, ...]:
    """Return the shadows of `content` by `order`: none if its pools or values do not allow it."""
    if order is None:
        return ()
    shadow = order.shadow()
    return (shadow,) if content.fits(shadow) and not any(shadow_traffic.faults(shadow)) else ()
