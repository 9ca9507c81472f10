"""Puts the parts of one run together: reads the model, merges sizes, opens the watch of the load."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from kvmesh.conformance.engine_state import sizes_of
from kvmesh.conformance.offer import SIZES, Disagreement, Offer, offer_of
from kvmesh.conformance.prompts import Prompts
from kvmesh.conformance.session import Client, Session
from kvmesh.conformance.share import share_of
from kvmesh.conformance.state_watch import MetricsSource, ReportSource, StateWatch, fetch_page
from kvmesh.conformance.trial import Settings, Trial
from kvmesh.triton.errors import EngineLost

PREFIX: Final = "conformance"
"""Beginning of all request ids, before a random part."""

DIGEST: Final = "engine_digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The engines of one run, and what the operator tells of them."""

    client: Client
    pair: Client | None = None
    metrics: str = ""
    """Address of Triton's metrics, "host:port"; empty: unknown."""
    sizes: Mapping[str, int]
    """Sizes by the names of `offer.SIZES`; 0: unknown."""


@asynccontextmanager
async def opened_trial(target: Target, settings: Settings) -> AsyncIterator[Trial]:
    """Read the models, and yield what the checks work with.

    Raises CallError if a server does not answer, Disagreement if two sources differ.
    """
    offer = await _offer(target.client, target.metrics, target.sizes)
    share = share_of(offer)
    if settings.concurrency:
        share = replace(share, concurrency=min(share.concurrency, settings.concurrency))
    prompts = Prompts(settings.seed, offer.vocab_size, settings.end_ids)
    prefix = f"{PREFIX}-{secrets.token_hex(4)}"
    engine = Session(target.client, offer, share.concurrency, prefix, call_s=settings.call_s)
    trial = Trial(engine, offer, share, prompts, settings)
    if target.pair is not None:
        other = await _offer(target.pair, "", target.sizes)
        _check_pair(offer, other)
        trial.pair = Session(target.pair, other, share.concurrency, prefix, call_s=settings.call_s)
    async with _watching(trial, target.metrics):
        yield trial


@asynccontextmanager
async def _watching(trial: Trial, metrics: str) -> AsyncIterator[None]:
    """Set the watch of the trial: by load reports where there are any, else by metrics."""
    if "load_report" in trial.offer.outputs:
        reports = ReportSource(trial.engine)
        following = asyncio.create_task(reports.run(), name="load-reports")
        trial.watch = StateWatch(reports, trial.engine)
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait((following,))
        return
    if metrics:
        page = await fetch_page(metrics, trial.offer.model)
        if page.state() is not None:
            trial.watch = StateWatch(MetricsSource(trial.engine, metrics, trial.prompts), trial.engine)
    yield


async def _offer(client: Client, metrics: str, sizes: Mapping[str, int]) -> Offer:
    metadata, config = await client.describe()
    if not metadata.inputs:
        raise EngineLost(f"the model at {client.address} has no inputs")
    if not metrics:
        return offer_of(metadata, config, sizes)
    told = sizes_of(await fetch_page(metrics, metadata.name))
    for name in SIZES:
        if told.get(name) and sizes.get(name) and told[name] != sizes[name]:
            raise Disagreement(f"{name} is {told[name]} by the metrics, but {sizes[name]} by the options.")
    return offer_of(metadata, config, {name: told.get(name) or sizes.get(name, 0) for name in SIZES})


def _check_pair(offer: Offer, other: Offer) -> None:
    """Raise Disagreement unless the pair serves the same model."""
    for name in (*SIZES, DIGEST):
        if name == "kv_blocks":
            continue
        one, two = offer.parameters.get(name, ""), other.parameters.get(name, "")
        if one and two and one != two:
            raise Disagreement(f"--pair serves another model: {name} is {two}, that of --triton is {one}.")
