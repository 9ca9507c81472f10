"""The Attach protocol: frames, outboxes, logs, names, and the two ends of a stream.

Pure parts (no I/O, no clock): `frames`, `names`, `outbox`, `token_log`. Shells: `client`, `server`.
"""
