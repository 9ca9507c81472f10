"""Runs a control process: `python -m controlplane`."""

import sys

from controlplane.main import main

sys.exit(main())
