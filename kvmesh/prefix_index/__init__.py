"""The prefix index in Redis: what replicas publish about their KV caches, and how it is written down.

Pure: `events` (codec), `translation` (engine events to mesh hashes). Shell: `publisher`.
The mirror that reads it is the router's.
"""
