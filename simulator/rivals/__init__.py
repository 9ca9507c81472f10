"""Policies of other routers, written from their published descriptions for the simulator; not those projects' programs."""
