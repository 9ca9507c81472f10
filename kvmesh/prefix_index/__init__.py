"""The prefix index in Redis: the published contents of the replicas' KV caches, and their encoding.

Pure: `events` (codec), `translation` (engine events to mesh hashes), `block_log` (the known cache). With I/O:
`publisher`. The router reads it into its local index (services/router/index).
"""
