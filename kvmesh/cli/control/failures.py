"""Failures of a command of the control plane, as sentences for people and as fields for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvmesh.errors import ErrorDetails

NO_CONTROL_PLANE: Final = (
    "No control plane runs in this mesh: set control.replicas = 1, or start one with "
    "`python -m controlplane`."
)

NEEDS_FORCE: Final = "Refused: the command needs --force."

NOT_LEADER: Final = "NOT_LEADER"
"""Reason of a process that does not lead. It names the leader, or none while there is none."""

OPTIONS: Final = {
    "to_pool": "--to",
    "baseline_pool": "--baseline",
    "steps_percent": "--steps",
    "bake": "--bake",
    "bake_max": "--bake-max",
    "keep_old": "--keep-old",
    "expectation": "--expect",
    "on_inconclusive": "--on-inconclusive",
    "only_tenants": "--only",
    "never_tenants": "--never",
    "requirements": "--require",
    "ttft_p95_max_s": "--ttft-p95-max",
    "error_share_max": "--error-share-max",
    "ttl": "--ttl",
    "until": "--until",
    "region": "REGION",
    "sample_permille": "--sample",
    "shadow_permille": "--shadow",
    "shadow_token_max": "--shadow-max-tokens",
    "first_tokens": "--mode",
    "token_max": "--max-tokens",
    "tokens_per_minute_max": "--max-tokens-per-minute",
    "reason": "--reason",
    "by": "--by",
    "process_id": "NAME",
    "requirement": "NAME",
    "to": "NAME",
    "rollout": "ROLLOUT",
}
"""Field of a request -> the option or argument that sets it."""


class ControlFailed(RuntimeError):
    """The control plane did not answer, or refused the command. `sentences` has no empty text."""

    def __init__(self, sentences: Sequence[str], **details: Any) -> None:
        super().__init__(" ".join(sentences))
        self.sentences = tuple(sentences)
        self.details = {key: value for key, value in details.items() if value not in (None, "", {}, (), [])}
        """The same facts for programs."""

    @property
    def may_be_forced(self) -> bool:
        """True if --force may override the reason. The control plane says so, or does not say that it may not."""
        is_state = self.details.get("code") == "FAILED_PRECONDITION"
        return (
            is_state and self.details.get("reason") != NOT_LEADER and self.details.get("can_force") != "false"
        )

    @property
    def is_outage(self) -> bool:
        """True if a later attempt may succeed: no control process answered, or none leads."""
        return self.details.get("code") == "UNAVAILABLE" or self.details.get("reason") == NOT_LEADER

    def with_force(self, overridden: Sequence[str]) -> ControlFailed:
        """Return the failure with the checks that --force would override."""
        said = [f"--force would override: {check.rstrip('.')}." for check in overridden]
        text = " ".join(self.sentences)
        is_all = self.details.get("can_force") == "true" or all(
            check.rstrip(".") in text for check in overridden
        )
        is_all_said = bool(overridden) and is_all  # a long refusal arrives shortened, and the checks do not
        first = (NEEDS_FORCE,) if is_all_said else self.sentences
        return ControlFailed((*first, *said), **{**self.details, "force_would_override": list(overridden)})


def refused(details: ErrorDetails, address: str) -> ControlFailed:
    """Return the refusal of the control process at `address`: one sentence per violation."""
    sentences = [f"{option_of(field)} {text.rstrip('.')}." for field, text in details.violations.items()]
    if not sentences:
        sentences = [_sentence(details, address)]
    return ControlFailed(
        sentences,
        code=details.code.name,
        reason=details.reason,
        text=details.message,
        violations=dict(details.violations),
        address=address,
        can_force=details.metadata.get("can_force", ""),
    )


def option_of(field: str) -> str:
    """Return the option that sets `field`, or the field itself."""
    path = field.removeprefix("settings.")
    name, bracket, rest = path.partition("[")
    return f"{OPTIONS[name]}{bracket}{rest}" if name in OPTIONS else field


def unanswered(faults: Sequence[str]) -> ControlFailed:
    """Return the failure of a command that no control process answered."""
    return ControlFailed(
        (f"No control process answers: {'; '.join(faults)}.", "The mesh serves on with its last snapshot."),
        code="UNAVAILABLE",
    )


def away(region: str, others: Sequence[str], faults: Sequence[str]) -> ControlFailed:
    """Return the failure of a command that no control process of `region` answered. `others`: regions to ask instead."""
    sentences = [f"No control process of region {region} answers: {'; '.join(faults)}."]
    if others:
        sentences.append(
            f"Another region shows how it observes {region}: `kvmesh region list --from {others[0]}`."
        )
        sentences.append(
            f"It moves its own callers away by `kvmesh region avoid {region} --from {others[0]} --ttl 1h --reason TEXT`."
        )
    return ControlFailed(sentences, code="UNAVAILABLE")


def lost(address: str, again: str) -> ControlFailed:
    """Return the failure of a writing call without its answer. `again`: the command that shows the result."""
    return ControlFailed(
        (
            f"The connection to {address} broke before its answer.",
            f"The command may be in force: `{again}` shows it.",
        ),
        code="UNAVAILABLE",
    )


def _sentence(details: ErrorDetails, address: str) -> str:
    text = details.message.rstrip(".") or "no reason given"
    return f"{details.reason or f'{details.code.name} of {address}'}: {text}."
