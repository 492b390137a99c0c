"""``python -m det_core.master``: a master in the foreground."""

import gc

gc.disable()  # what is loaded now stays: looking for garbage in it would take a tenth of the start

from det_core.master._server import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
