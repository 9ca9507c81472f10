"""The Attach protocol: one long-lived stream per pair of processes, with many slots (docs/decisions/0001).

Pure parts (no I/O, no clock): `frames`, `names`, `rules`, `outbox`, `token_log`, `refusal`, `dial_budget`,
`caller_session`. With I/O: `client`, `server`, `writer`, `link_manager`, `dialing`, `dial_queue`.
"""
