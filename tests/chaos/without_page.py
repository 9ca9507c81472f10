"""Renders the section of docs/measurements/faults.md about the mesh without its control plane. Pure."""

from __future__ import annotations

from bench import pages
from tests.chaos.without_record import WithoutRecord


def without_section(record: WithoutRecord) -> list[str]:
    """Return the lines of the page about the mesh without its control plane, and about rolling drains."""
    dead, canary, drains = record.dead, record.canary, record.drains
    rows = [
        (
            f"{drains.by_control} drains by the control plane, {drains.by_signal} by SIGTERM",
            *(f"{drains.requests:,}", f"**{drains.lost}**"),
            f"longest wait for a message {drains.longest_pause_s:.2f} s",
        ),
        (
            f"control plane dead for {dead.dead_s / 60:.1f} minutes",
            *(f"{dead.requests:,}", f"**{dead.lost}**"),
            f"longest wait for a message {dead.longest_pause_s:.2f} s",
        ),
        (
            "canary's pool killed as well",
            *(f"{canary.requests:,}", f"**{canary.refused}**"),
            _prose(
                f"longest wait for a first token {canary.first_token_s:.2f} s;",
                f"longest time with refusals {canary.refused_s:.1f} s",
            ),
        ),
        (
            "`kvmesh snapshot stable --direct`",
            *(f"{canary.direct_requests:,}", f"**{canary.direct_lost}**"),
            f"{canary.direct_canary} at the canary, which serves again",
        ),
    ]
    deeds = (f"{deed} {dead.deeds.count(deed)} times" for deed in dict.fromkeys(dead.deeds))
    return [
        "## Without the control plane",
        "",
        _prose(
            f"**Command.** `{record.command}`: {record.seconds / 60:.0f} minutes; {record.machine};",
            f"{record.began[:16].replace('T', ' ')} UTC; commit {record.commit}.",
        ),
        "",
        _prose(
            "**How.** Processes of one machine: 2 frontends, 2 control processes and two pools. The pool",
            "`stable` has 2 routers, 2 prefill and 2 decode replicas; `next` has 1 of each. A rollout gives `next`",
            f"{record.weight_percent} %. 6 clients send the requests of 50 sessions. Each token is compared with a",
            "calculation without a server. Clients use `kvmesh.client`, and plain gRPC where the canary's pool is killed.",
        ),
        "",
        *pages.table(("case", "requests", "**lost or refused**", ""), rows, "lrrl"),
        "",
        "While every control process was dead:",
        "",
        *pages.items(deeds),
        "",
        _prose(
            f"The canary gave {100 * dead.share_before:.1f} % of the answers before and",
            f"{100 * dead.share_after:.1f} % at the end. {dead.moved_sessions} sessions changed their pool.",
            f"All receivers held snapshot {dead.snapshot_before} before and {dead.snapshot_after} at the end. The rollout",
            "continued when a control process was back.",
        ),
        "",
        _prose(
            f"When the canary's pool died, {canary.bound} requests that had begun there ended with STALE_SNAPSHOT, by",
            f"design. {canary.sessions} sessions of the canary went on at `stable`. The snapshot of `--direct`,",
            f"{canary.direct_snapshot}, outlived an emptied Redis. A new control process took the rollout back.",
        ),
        "",
        *pages.items(f"**{fault}**" for fault in record.faults),
        *([""] if record.faults else []),
    ]


def _prose(*parts: str) -> str:
    return " ".join(parts)
