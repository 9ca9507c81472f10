"""A shadow in words and tables: its settings, its counts, its comparison. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.text import Text

from kvmesh.cli.control.rollout_text import word_of
from kvmesh.cli.fitted_table import Column, FittedTable
from kvmesh.control.v1 import shadow_pb2 as pb

_CRITERIA: Final = (
    Column("criterion"),
    Column("figure (99 % interval)", justify="right"),
    Column("unit", rank=3),
    Column("reference (99 % band)", justify="right"),
    Column("samples", rank=2, justify="right"),
    Column("p", rank=1, justify="right"),
    Column("result"),
)
_DIFFERENCES: Final = (
    Column("request"),
    Column("pool", rank=3),
    Column("kind"),
    Column("position", rank=1, justify="right"),
    Column("user", rank=2),
    Column("copy", rank=2),
)


def headline(shadow: pb.ShadowView) -> str:
    """Return one line: id, pools, sample, mode, state."""
    settings = shadow.settings
    aa = ", A/A" if shadow.aa else ""
    state = "running" if shadow.running else f"ended: {shadow.end_reason or 'unknown'}"
    return (
        f"{settings.shadow}: {sample_text(settings)} of sessions to {settings.to_pool} "
        f"({shadow.to_version or 'version unknown'}{aa}), {mode_text(settings)}: {state}"
    )


def sample_text(settings: pb.Shadow) -> str:
    """Return the share of sessions, for example "5 %"."""
    return f"{settings.sample_permille / 10:g} %"


def mode_text(settings: pb.Shadow) -> str:
    """Return the mode as it is given on the command line."""
    word = word_of(pb.Shadow.Mode, settings.mode, "MODE_").lower().replace("_", "-")
    return f"first:{settings.first_tokens}" if settings.mode == pb.Shadow.MODE_FIRST else word


def verdict_text(shadow: pb.ShadowView) -> str:
    """Return the result in one sentence."""
    if shadow.aa and shadow.verdict == "needs more":
        return f"This A/A shadow has {shadow.counts.target.sessions} sessions: too few for a reference of later shadows."
    texts = {
        "beyond": "The target is beyond the 99 % band of the reference.",
        "within": "The target is within the 99 % band of the reference.",
        "needs more": "More sessions are needed for a comparison.",
        "no reference": "There is no reference: run a shadow to a pool of the stable version (A/A) first.",
        "reference": "This A/A shadow is the reference of later shadows.",
    }
    return texts.get(shadow.verdict, shadow.verdict)


def count_lines(shadow: pb.ShadowView) -> list[str]:
    """Return the counts in lines."""
    counts, settings = shadow.counts, shadow.settings
    used = f"{counts.tokens:,} of {settings.token_max:,} tokens used"
    lines = [f"{counts.sampled:,} requests sampled, {counts.copied:,} copied, {used}"]
    if counts.dropped:
        lines.append(f"not copied or not compared: {_counted(counts.dropped)}")
    if counts.target.errors:
        lines.append(f"errors of copies alone: {_counted(counts.target.errors)}")
    arm = counts.target
    if arm.ended_pairs:
        lines.append(
            f"{arm.ended_pairs:,} pairs ended well, {arm.finish_differences:,} with another finish reason"
        )
    if arm.logprobs:
        drift = arm.logprob_sum / arm.logprobs
        lines.append(f"mean drift of log-probabilities {drift:+.4g} over {arm.logprobs:,} tokens")
    off = [f"{each.process_id} ({each.off_reason})" for each in shadow.frontends if each.off_reason]
    if off and shadow.running:
        lines.append(f"frontends that copy nothing now: {', '.join(off)}")
    return lines


def criteria_table(shadow: pb.ShadowView) -> RenderableType:
    """Return the criteria with figure, interval, band and result."""
    table = FittedTable(_CRITERIA)
    for each in shadow.criteria:
        samples = f"{each.samples:,}" + (f" / {each.reference_samples:,}" if each.reference_samples else "")
        table.add_row(
            each.name,
            _figure(each, "figure", "low", "high"),
            each.unit,
            _figure(each, "reference", "band_low", "band_high"),
            samples,
            f"{each.p:.2g}" if each.HasField("p") else "-",
            each.result,
        )
    return table


def screen(shadow: pb.ShadowView, time_text: Callable[[Timestamp], str], note: str = "") -> RenderableType:
    """Return the whole report."""
    started = f"started {time_text(shadow.started_at)}"
    if shadow.started_by:
        started += f" by {shadow.started_by}"
    parts: list[RenderableType] = [Text(headline(shadow), style="bold"), Text(started)]
    parts += [Text(line) for line in count_lines(shadow)]
    if shadow.criteria:
        parts.append(criteria_table(shadow))
    reference = f" Reference: {shadow.reference}." if shadow.reference else ""
    parts.append(Text(verdict_text(shadow) + reference))
    if shadow.differences:
        parts.append(differences_table(shadow))
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def differences_table(shadow: pb.ShadowView) -> RenderableType:
    """Return the latest differences."""
    table = FittedTable(_DIFFERENCES)
    for each in shadow.differences:
        table.add_row(
            *(each.request_id, each.pool, each.kind, str(each.position), each.user_outcome, each.copy_outcome)
        )
    return table


def plain_line(shadow: pb.ShadowView) -> str:
    """Return the state in one line, for a pipe."""
    parts = [headline(shadow), *count_lines(shadow)[:1]]
    parts += [
        f"{each.name} {_figure(each, 'figure', 'low', 'high')} {each.unit}: {each.result}"
        for each in shadow.criteria
        if each.HasField("figure")
    ]
    return "; ".join(parts)


def _figure(criterion: pb.ShadowCriterion, name: str, low: str, high: str) -> str:
    found = {field.name: value for field, value in criterion.ListFields()}
    if name not in found:
        return "-"
    value, least, most = (found.get(each, 0.0) for each in (name, low, high))
    return f"{value:.4g} ({least:.3g} to {most:.3g})"


def _counted(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
