"""Run every benchmark of this folder, or those named: ``python -m benchmarks [--quick] [NAME ...]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks._program import QUICK, options

FOLDER = Path(__file__).parent


def main() -> int:
    """Run each benchmark in a process of its own; the number of those that failed is the exit status."""
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark (default: all)")
    names = parser.parse_args().names
    known = sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))
    if unknown := sorted(set(names) - set(known)):
        print(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or known:
        status = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *["--quick"] * QUICK], cwd=FOLDER.parent
        ).returncode
        if status:
            failed.append(f"{name} (exit {status})")
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
