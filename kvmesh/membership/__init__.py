"""Membership and service discovery: each process holds a lease in Redis and keeps a view of all leases.

A lease is a registration with a time to live (TTL). Its process renews it every RENEW_S; each renewal is a heartbeat.
`{mesh}:proc:<id>` holds a Member as JSON and expires after LEASE_S. `{mesh}:procs` is the set of ids. `{mesh}:proc-news` is
a channel for changes: each message causes a poll. While Redis is unavailable, the last view stays (degraded mode).

Pure: `member` (the contents of a lease), `election` (which of several processes holds a name), `view` (the present
members), `address_filter`. With I/O: `registration` (renews a lease), `membership` (updates a view).
"""
