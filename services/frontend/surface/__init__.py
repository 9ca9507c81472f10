"""The client's side of the frontend: from a client's bytes to requests, and from answers to bytes."""
