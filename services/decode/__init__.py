"""The decode service: slots, KV-cache reservations, step frames, detached streams and stream takeover."""
