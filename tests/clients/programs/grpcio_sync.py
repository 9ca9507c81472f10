"""The client on grpcio's synchronous calls, with a thread for each call."""

from __future__ import annotations

import base64
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tests.clients.programs.grpcio_commands import Record, credentials, options, say


class Calls:
    """The channels of the process."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}

    def channel(self, command: dict[str, Any]) -> grpc.Channel:
        """Return the channel of a command, made by the first one."""
        name = command["channel"]
        if name not in self._channels:
            trusted, target = credentials(command), command["target"]
            self._channels[name] = (
                grpc.secure_channel(target, trusted, options(command))
                if trusted
                else grpc.insecure_channel(target, options(command))
            )
        return self._channels[name]

    def run(self, command: dict[str, Any], channel: grpc.Channel) -> None:
        """Make the calls of one command."""
        began = threading.Event()

        def begin() -> None:
            if not began.is_set():
                began.set()
                say(command["id"], first=True)

        with ThreadPoolExecutor(command["count"]) as threads:
            calls = [threads.submit(self._call, command, channel, begin) for _ in range(command["count"])]
            say(command["id"], outcomes=[each.result() for each in calls])

    def _call(self, command: dict[str, Any], channel: grpc.Channel, begin: Any) -> dict[str, Any]:
        record, path, request = Record(command), command["path"], base64.b64decode(command["request"])
        keywords = {
            "timeout": command["deadline_s"],
            "metadata": [tuple(each) for each in command["metadata"]],
            "compression": grpc.Compression.Gzip if command["gzip"] else None,
        }
        call: Any
        if not command["streams"]:
            try:
                answer, call = channel.unary_unary(path, None, None).with_call(request, **keywords)
                record.take(answer)
            except grpc.RpcError as error:
                call = error
        else:
            call = channel.unary_stream(path, None, None)(request, **keywords)
            try:
                for message in call:
                    record.take(message)
                    begin()
                    if record.message_count == command["cancel_after"]:
                        call.cancel()
            except grpc.RpcError:
                pass
        return record.end(call.code(), call.details(), call.trailing_metadata())


def main() -> None:
    """Serve commands until stdin ends."""
    calls = Calls()
    for line in sys.stdin:
        command = json.loads(line)
        threading.Thread(target=calls.run, args=(command, calls.channel(command)), daemon=True).start()


main()
