"""Placement: chooses the prefill and decode replica of each request by total delay, of the request and of others."""
