"""Traffic between regions, as the control plane and the services compute it alike.

Pure: `quantity` (load and headroom), `lease` (decay of a grant that is not renewed), `spill` (share of the own callers for
each other region), `targets` (the region of a session), `bucket` (a grant at a router of the target).
"""
