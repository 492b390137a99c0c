"""``python -m det_core.cli``."""

from det_core.cli import main

raise SystemExit(main())
