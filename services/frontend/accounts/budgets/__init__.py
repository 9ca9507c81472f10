"""What a request may cost: reserved before it starts, settled when it has ended, from leased slabs or in Redis."""
