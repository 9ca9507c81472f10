"""Which replica has which blocks of a prompt in cache, and which it will have soon."""
