"""The router's prefix index: the blocks that each replica has in cache, and will have soon."""
