"""The budget of one organisation as a script that Redis runs: operations of one account, each atomic, one after the other.

Commands of Redis 6.2 alone; on a Cluster too. KEYS, of one hash tag:
1 levels  hash  scope -> request level, token level, ms: how full the two buckets were at that time; inf: not limited;
          then, if there is a claim, its tokens, and from when to when in ms
2 open    hash  rid -> a reservation, or what is remembered of it; "#<scope>" -> slots held; "#~<scope>" -> open overrun,
          its epoch, and what slabs hold free of it; "+" -> the ledger, and the epoch
3 leases  sorted set  rid -> when its lease ends, or when it may be forgotten, in ms

A level counts in sixty-thousandths: what a rate of 1 per minute adds in 1 ms. So all sums are exact. Levels are at most the
burst; below 0 they are debt. A reservation is a letter, o: open, w: swept; tokens, requests, slots, used tokens, used
requests, number; then its scopes, one a line; then, with an open overrun, a line of "~", the overrun, its epoch, and of a
slab what it holds free of it. "s" alone: settled.

The open overrun of a scope is the sum over its open reservations: tokens that may still be used beyond those reserved. A
release before it keeps reservations' lines as they are, and writes the ledger without the epoch when it changes anything. A
new epoch then begins: what carries an older one counts as 0, and renewals state it anew within seconds.

A claim keeps a large request from starving beside small ones. Who needs more than half of a burst and is refused for want
of tokens leaves one, not on an organisation: one tenant must not hold up another. While it stands, whoever needs less is
refused, and slabs get nothing more. It ends when somebody is admitted who needs as much, or when the one who left it
should have come back; then there is no other for as long as it stood: small ones have half of the time.

ARGV: now in ms (0: the server's own clock; anything else is for tests); per scope requests per minute, their burst in
sixty-thousandths, tokens per minute, their burst likewise, slots, tokens of open overrun, where inf means not limited;
the names of the scopes; then per operation its name, what it takes (see wire), and names of reservations. Numbers
are doubles, little-endian: to read and write text costs more than all sums. Answers are in the order of the operations.

Slots, reservations and ledger live in one hash so that they are lost together; leases that do not fit it empty it. Reads
come first and writes last, each of them one command, whatever the number of operations: most of the cost is commands.
"""

from __future__ import annotations

from typing import Final

from kvmesh.buckets.script_operations import DRAW, LOWER, RENEW, RESERVE, REST, SETTLE
from kvmesh.buckets.script_state import READ, WRITE

TEXT: Final = READ + WRITE + RESERVE + SETTLE + RENEW + LOWER + DRAW + REST
