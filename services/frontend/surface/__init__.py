"""From a client's bytes to requests, and from answers to bytes."""
