"""Budgets, executions and settlements of one frontend, built as one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvmesh.buckets.ledger import Ledger
from kvmesh.clock import Clock
from kvmesh.config import MeshConfig
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.tenants.labels import Labels
from services.frontend.accounts.accounting import Accounting
from services.frontend.accounts.budgets.batcher import ANSWER_S
from services.frontend.accounts.budgets.budgets import Budgets, watch_budgets
from services.frontend.accounts.budgets.metrics import BudgetMetrics
from services.frontend.accounts.executions import Executions
from services.frontend.accounts.settlement import Charge, Settlements


class Accounts:
    """Built by `Frontend`, run by the tasks of `background`. `accounting` serves the requests.

    `on_news`: as of Executions. `on_charge`: as of Settlements. `answer_s`: longest wait for an answer of Redis.
    """

    def __init__(
        self,
        config: MeshConfig,
        redis: RedisLink,
        budgets_redis: RedisLink,
        boot_id: str,
        clock: Clock,
        metrics: Metrics,
        *,
        on_news: Callable[[str, int, str], None],
        on_charge: Callable[[Charge], None],
        answer_s: float = ANSWER_S,
    ) -> None:
        mesh, longest_s = config.mesh.name, max(config.frontend.runtime_max_s, config.runtime_longest_s)
        counters = BudgetMetrics(metrics, Labels(config.tenants).of)
        self.budgets = Budgets(Ledger(budgets_redis, mesh), boot_id, clock, counters, answer_s=answer_s)
        self.executions = Executions(redis, mesh, boot_id, clock, longest_s, on_news, answer_s=answer_s)
        self.settlements = Settlements(redis, mesh, longest_s, on_charge)
        self.accounting = Accounting(self.settlements, self.budgets)
        watch_budgets(metrics, self.budgets)
        _watch_executions(metrics, self.executions, self.settlements)

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks of executions, settlements and budgets, by name.

        Each is a task of its own: `kvmesh.tasks.end` cancels it again if a cancellation is swallowed.
        """
        yield "executions", self.executions.run()
        yield "settlements", self.settlements.run()
        yield "budgets", self.budgets.run()

    async def flush(self, timeout_s: float) -> None:
        """Wait until no settlement and no operation of budgets waits for Redis, at most `timeout_s`."""
        await self.settlements.flush(timeout_s / 2)
        await self.budgets.flush(timeout_s / 2)


def _watch_executions(metrics: Metrics, executions: Executions, settlements: Settlements) -> None:
    """Export requests without a number, and waiting and dropped settlements."""
    metrics.total(
        "unfenced_requests",
        "Requests that started without an execution number from Redis.",
        lambda: executions.unfenced_total,
    )
    metrics.gauge("settlements_waiting", "Settlements that wait for Redis.", lambda: len(settlements))
    metrics.total("settlements_dropped", "Settlements that were dropped.", lambda: settlements.dropped_total)
