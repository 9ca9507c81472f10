"""Runs an xDS server: `python -m controlplane.xds`."""

import sys

from controlplane.xds.main import main

sys.exit(main())
