"""The decode service: slots, KV reservations, frames, orphans and adoption."""
