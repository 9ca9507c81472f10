"""The table of trials, and the page docs/measurements/kubernetes.md. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bench import pages
from tests.kubernetes.record import KUBELET_S, Record, Step, by_name

HEAD: Final = (
    *("step", "streams", "lost", "went on elsewhere", "longest pause, s", "duration, s"),
    *("end of a pod, s", "its grace, s", "killed"),
)


def lines(record: Record) -> list[str]:
    """Return the lines of the page behind its title."""
    streams = sum(step.streams for trial in record.trials for step in trial.steps)
    lost = sum(len(step.lost) for trial in record.trials for step in trial.steps)
    ready = pages.spread((trial.ready_s for trial in record.trials), 0)
    first = pages.spread((trial.first_token_s for trial in record.trials), 0)
    made = [
        *pages.paragraph(
            f"**Command.** `{record.command}`: {record.seconds / 60:.0f} minutes; "
            f"{record.began[:16].replace('T', ' ')} UTC; commit {record.commit}; images {record.images}."
        ),
        "",
        *pages.paragraph(f"**Cluster.** {record.cluster}. Clients: {record.machine}."),
        "",
        *pages.paragraph(_HOW),
        "",
        *pages.paragraph(
            f"**{lost} of {streams + lost:,} streams lost** in {len(record.trials)} trials. All pods were ready {ready} s "
            f"after `kubectl apply`, and the first token came after {first} s."
        ),
        "",
        *pages.table(HEAD, (_row(name, steps) for name, steps in by_name(record.trials).items()), "lr"),
        "",
    ]
    if record.violations:
        made += ["Violations:", "", *pages.items(record.violations), ""]
    return made


def page(record: Record) -> list[str]:
    """Return the page's lines."""
    return ["# Kubernetes", "", *lines(record)]


def _row(name: str, steps: Iterable[Step]) -> tuple[str, ...]:
    each = list(steps)
    graces = sorted({f"{step.grace_s:g}" for step in each if step.grace_s is not None})
    return (
        name,
        pages.spread((float(step.streams) for step in each), 0),
        f"**{sum(len(step.lost) for step in each)}**",
        pages.spread((float(step.moved) for step in each), 0),
        pages.spread((step.pause_s for step in each), 2),
        pages.spread((step.seconds for step in each), 0),
        pages.spread((step.end_s for step in each), 1),
        ", ".join(graces) or "-",
        f"{sum(len(step.killed) for step in each)}",
    )


_HOW: Final = (
    "**How.** The overlay laptop with 2 frontends and 2 routers, and engines that make 25 tokens a second for each "
    "stream. Each client has one stream at a time and dials the frontends that are ready at its start. Every token is "
    "compared with a calculation without a server. A restart is `kubectl rollout restart`. An eviction goes through the "
    "Eviction API, and a second one of the same role at once must be refused. A lost pod is deleted with a grace of 0. "
    "The next step begins when all pods are ready and the old ones are gone. The end of a pod is that of the pod that used "
    f"most of its grace. It may exceed the grace by {KUBELET_S:g} s, in which the kubelet removes the pod. Several "
    "trials: median [smallest..largest]."
)
