"""The interface between the Triton model and an engine."""

from collections.abc import Callable
from typing import Protocol

from engines.contract.publisher import Subscriber
from engines.contract.request import EngineRequest, EventCursor


class Engine(Protocol):
    """Runs requests; its outputs go to the model's output queue. All methods are thread-safe and return soon."""

    def submit(self, request: EngineRequest) -> None:
        """Run a request. Its stream is open in the output queue.

        Raises EngineError for a request that was rejected before it took a slot: its stream gets the error. A later
        rejection arrives as the final output.
        """

    def cancel(self, key: int) -> None:
        """End the request or subscription with this key, after its client has cancelled. Unknown keys are ignored."""

    def stop(self, request_id: str) -> None:
        """Cancel all open requests with this Triton id and release their handoffs. Unknown ids are ignored."""

    def release_handoff(self, context_phase_params: bytes, on_released: Callable[[], None]) -> None:
        """Release a held handoff, then call `on_released`. Raises EngineError if the blob is malformed.

        A handoff that is not held is no error.
        """

    def subscribe_events(self, key: int, subscriber: Subscriber, cursor: EventCursor | None = None) -> None:
        """Send all KV events after `cursor` to `subscriber`, or a snapshot first."""

    def subscribe_load(self, key: int, subscriber: Subscriber) -> None:
        """Send load reports to `subscriber`."""

    def close(self) -> None:
        """End everything; open requests end with an error."""
