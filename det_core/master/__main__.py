"""``python -m det_core.master``: a master in the foreground."""

from det_core.master._server import main

if __name__ == "__main__":
    raise SystemExit(main())
