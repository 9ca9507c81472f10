"""Waits for an engine whose processes were stopped (SIGSTOP) and go on (SIGCONT)."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.harness import START_S_MAX, Part, until


async def until_back(engine: Part, is_back: Callable[[], bool], what: str) -> bool:
    """Wait until `is_back`. Return False if the engine had to be started again.

    tritonserver may abort with `boost::interprocess::lock_exception` when it goes on together with its Python model. Then
    the engine is started again, as a supervisor does.
    """
    has_gone_on = True

    async def holds() -> bool:
        nonlocal has_gone_on
        if engine.has_fallen:
            has_gone_on = False
            await engine.end()
            engine.start()
        return is_back()

    await until(holds, 2 * START_S_MAX, what)
    return has_gone_on
