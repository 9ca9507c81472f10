"""KV events of one subscription, in order, and the judgement whether they tell a prompt's blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_STORED: Final = "stored"


class EventLog:
    """The messages of one subscription.

    `fault` is the first breach of the contract: a message without its fields, a gap in the ids, another boot id.
    """

    def __init__(self) -> None:
        self.fault = ""
        self.boot_id = ""
        self.event_id: int | None = None
        """Id of the last event that was told; None: no message yet."""
        self.is_complete = False
        """True once the snapshot has come to its end, or the first event has come without one."""
        self.has_snapshot = False
        self._blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Hash -> (hash of the parent, tokens)."""

    def add(self, message: Mapping[str, Any]) -> None:
        """Take one message."""
        try:
            self._add(message)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self._fail(f"a message of KV events is malformed: {type(error).__name__}: {error}")

    def chain_fault(self, prompt: Sequence[int], width: int) -> str:
        """Return why the full blocks of `prompt` are not stored, each below its parent; empty: they are."""
        parent: int | None = None
        for index in range(len(prompt) // width):
            wanted = (parent, tuple(prompt[index * width : (index + 1) * width]))
            found = next((value for value, known in self._blocks.items() if known == wanted), None)
            if found is None:
                below = "with parent_hash null" if parent is None else "below the block before it"
                return f"no stored block has the tokens of block {index} of the prompt, {below}"
            parent = found
        return ""

    def position(self) -> str:
        """Return the value of `after` that goes on behind this subscription."""
        return f"{self.boot_id}:{self.event_id}"

    def _add(self, message: Mapping[str, Any]) -> None:
        boot_id = str(message["boot_id"])
        if self.boot_id and boot_id != self.boot_id:
            self._fail(f"the boot id changed from {self.boot_id} to {boot_id}")
        self.boot_id = boot_id
        if "snapshot" in message:
            self.has_snapshot = True
            for data in message["snapshot"]:
                self._take(data)
            self.event_id = int(message["event_id"])
            self.is_complete = not message.get("more", False)
            return
        self.is_complete = True
        for event in message["events"]:
            number = int(event["event_id"])
            if self.event_id is not None and number != self.event_id + 1:
                self._fail(f"event {number} came after event {self.event_id}")
            self.event_id = number
            self._take(event["data"])

    def _take(self, data: Mapping[str, Any]) -> None:
        if data["type"] == _STORED:
            parent = data["parent_hash"]
            for block in data["blocks"]:
                tokens = tuple(int(token["token_id"]) for token in block["tokens"])
                self._blocks[block["block_hash"]] = (parent, tokens)
                parent = block["block_hash"]
        elif data["type"] == "removed":
            for value in data["block_hashes"]:
                self._blocks.pop(value, None)

    def _fail(self, fault: str) -> None:
        self.fault = self.fault or fault
