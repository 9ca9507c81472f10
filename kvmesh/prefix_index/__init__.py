"""The prefix index in Redis: what replicas publish about their KV caches, and how it is written down.

Pure: `events` (codec), `translation` (engine events to mesh hashes), `block_log` (the cache it knows). Shell: `publisher`.
The mirror that reads it is the router's.
"""
