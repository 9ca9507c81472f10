"""`python -m services.prefill`."""

from services.prefill.main import main

raise SystemExit(main())
