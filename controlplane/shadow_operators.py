"""Commands of operators about shadow traffic: each becomes the desired document to write, or a refusal. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.command_queue import Author
from controlplane.core import ControlCore
from controlplane.library import Document
from controlplane.operators import Prepared, checked_reason
from controlplane.rollouts.commands import CommandRefused
from controlplane.shadow import settings
from controlplane.shadow.order import ShadowOrder
from kvmesh.control.v1 import shadow_pb2 as pb


class ShadowOperators:
    """See the module. Methods raise MeshError for bad requests. `wall()` is Unix time."""

    def __init__(self, core: ControlCore, wall: Callable[[], float]) -> None:
        self._core = core
        self._wall = wall

    def start(
        self, request: pb.StartShadowRequest, author: Author, shadow: str
    ) -> tuple[Prepared, ShadowOrder]:
        """Start the shadow `shadow`. Return the command and its order."""
        core = self._core
        order = settings.parse(
            request,
            shadow,
            versions=core.versions(),
            stable=core.content.stable,
            others=core.of_other_models(),
            wall_s=self._wall(),
            by=author.name,
        )
        make = partial(self._with, order)
        return Prepared("shadow.start", shadow, make, checked_reason(request.reason)), order

    def stop(self, request: pb.StopShadowRequest) -> Prepared:
        """End the running shadow. It needs no Redis: the copies end at once."""
        running = self._core.library.desired.shadow
        name = running.id if running is not None else ""

        def make(_: float) -> tuple[Document, tuple[str, ...]]:
            return self._core.library.desired.with_shadow(None), ()

        return Prepared("shadow.stop", name, make, checked_reason(request.reason), is_back=True)

    def _with(self, order: ShadowOrder, now_s: float) -> tuple[Document, tuple[str, ...]]:
        core = self._core
        desired, content, view = core.library.desired, core.content, core.view(now_s)
        if desired.shadow is not None and desired.shadow.id != order.id:
            raise CommandRefused(
                f'the shadow "{desired.shadow.id}" runs already; `kvmesh shadow stop` ends it'
            )
        if content.stable.model_version != order.stable_version:
            raise CommandRefused(
                f'the stable version has changed to "{content.stable.model_version}"; try again'
            )
        settings.check_mesh(order, core.registry.ordered(), view.pools)
        return desired.with_shadow(order), ()
