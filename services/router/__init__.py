"""The router: sees every replica's cache, queues, places and relays. Never touches text."""
