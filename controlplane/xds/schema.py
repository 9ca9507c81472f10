"""The xDS messages, in a descriptor pool of their own.

The stubs of xDS must not be imported: packages of PyPI that have them overwrite modules of other packages
(`tools/xds_descriptors.py`, which writes the descriptors).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

DESCRIPTORS: Final = Path(__file__).with_name("descriptors.binpb")

TYPE_PREFIX: Final = "type.googleapis.com/"
"""Prefix of the type URL of every message."""


class Schema:
    """Classes of the messages in a FileDescriptorSet, by full name."""

    def __init__(self, descriptors: bytes) -> None:
        """Take the descriptors. Each file comes after its dependencies."""
        self._pool = DescriptorPool()
        for file in FileDescriptorSet.FromString(descriptors).file:
            self._pool.Add(file)

    def message(self, name: str) -> type[Message]:
        """Return the class of the message with the full name `name`. Raises KeyError."""
        return GetMessageClass(self._pool.FindMessageTypeByName(name))

    def build(self, name: str, fields: Mapping[str, Any]) -> Any:
        """Return a message `name` with `fields`, in protobuf's JSON form. An Any has its type under "@type"."""
        return json_format.ParseDict(dict(fields), self.message(name)(), descriptor_pool=self._pool)

    def unpack(self, packed: Any) -> Any:
        """Return the message in an Any. Raises KeyError for a type that the descriptors lack, and DecodeError."""
        return self.message(packed.type_url.removeprefix(TYPE_PREFIX)).FromString(packed.value)


def load() -> Schema:
    """Return the schema of this release. It takes some 10 ms."""
    return Schema(DESCRIPTORS.read_bytes())
