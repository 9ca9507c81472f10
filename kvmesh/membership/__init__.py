"""Who is in the mesh: every process holds a lease in Redis, every process keeps a view of all leases.

`{mesh}:proc:<id>` holds a Member as JSON and expires after LEASE_S; `{mesh}:procs` is the set of ids; `{mesh}:proc-news`
is a channel that says "look again". While Redis is away the last view stays.

Pure: `member` (what a lease says), `election` (which of several processes holds a name), `view` (the members in force).
Shells: `registration` (keeps a lease), `membership` (keeps a view).
"""
