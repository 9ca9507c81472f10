"""The Attach protocol: frames, outboxes, logs, and the two ends of a stream.

Pure parts (no I/O, no clock): `frames`, `outbox`, `token_log`. Shells: `client`, `server`.
"""
