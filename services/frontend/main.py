"""Starts a frontend: config -> build -> serve -> drain."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from kvmesh import server as shell
from kvmesh import service_options
from kvmesh.clock import MonotonicClock
from kvmesh.config import ConfigError
from kvmesh.membership import telemetry as name_telemetry
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.membership import Membership
from kvmesh.membership.registration import Registration
from kvmesh.metrics import exposed
from kvmesh.redis_link import RedisLink
from kvmesh.redis_url import BUDGETS_VARIABLE
from kvmesh.service_options import ServiceOptions
from kvmesh.tasks import end
from kvmesh.telemetry import start_logging
from services.frontend.assembly import FLUSH_S, Frontend
from services.frontend.mesh_secret import MeshSecret
from services.frontend.readiness import follow_routers
from services.frontend.surface.tokenizer import ModelFolderError, ModelTokenizer

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a frontend until it is asked to stop; exits with a sentence where it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m services.frontend")
    service_options.add_options(parser, "frontend", os.environ)
    given = parser.parse_args(arguments)
    try:
        options = service_options.read(given)
        start_logging(options.config.telemetry.log_level, "frontend", options.process_id)
        tokenizer = ModelTokenizer.load(options.config.mesh.model_path)
        sys.exit(shell.run(serve(options, os.environ.get(BUDGETS_VARIABLE, ""), tokenizer)))
    except (ConfigError, ModelFolderError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


async def serve(options: ServiceOptions, budgets_redis_url: str, tokenizer: ModelTokenizer) -> int:
    """Serve until a signal; return the exit status. `budgets_redis_url`: Redis of the budgets, if it is another."""
    redis, mesh = RedisLink(options.redis_url), options.config.mesh.name
    budgets_redis = RedisLink(budgets_redis_url) if budgets_redis_url else redis
    frontend = Frontend(options, tokenizer, redis, budgets_redis)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.close)
        stack.push_async_callback(budgets_redis.close)
        address = await frontend.server.listen(options.listen)
        host = address.rpartition(":")[0]
        metrics_address = await stack.enter_async_context(
            exposed(frontend.metrics, host, options.metrics_port)
        )
        frontend.metrics.process_gauges()
        member = frontend.member(options.advertise.address(address))
        registration = Registration(redis, mesh, member, frontend.server.stand_by)
        address_filter = AddressFilter(frontend.networks)
        name_telemetry.export(registration, address_filter, frontend.metrics)
        membership = Membership(
            redis, mesh, frontend.on_members, own=registration, address_filter=address_filter
        )
        secret = MeshSecret(redis, mesh, frontend.seal)
        await secret.renew()
        await frontend.tenants.start()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [
            tasks.create_task(frontend.links.run(), name="router-links"),
            tasks.create_task(membership.run(), name="membership"),
            tasks.create_task(registration.run(), name="registration"),
            tasks.create_task(secret.run(), name="mesh-secret"),
            tasks.create_task(frontend.accounts.run(), name="accounts"),
            tasks.create_task(frontend.tenants.run(), name="tenants"),
        ]
        await frontend.server.set_serving(True)
        readiness = follow_routers(frontend.core.peers, MonotonicClock(), frontend.server.set_serving)
        running.append(tasks.create_task(readiness, name="readiness"))
        frontend.server.announce(metrics_address)
        log.info("serving", extra={"address": address, "model_version": member.model_version})
        gc.collect()
        gc.freeze()  # what is built lives as long as the process; the collector need not walk it again

        async def drain() -> None:
            registration.update(draining=True)
            await frontend.drain()

        try:
            await frontend.server.run(drain)
        finally:
            await frontend.accounts.flush(FLUSH_S)
            await end(running)
            await registration.deregister()
            frontend.close()
    return 0
