"""Gossip between peer routers about their dispatches, with anti-entropy digests, so that each router counts all work."""
