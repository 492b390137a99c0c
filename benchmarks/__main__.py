"""Run every benchmark of this folder, or those named: ``python -m benchmarks [NAME ...]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main(names: list[str]) -> int:
    """Run each benchmark in a process of its own; the number of those that failed is the exit status."""
    known = sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))
    if unknown := sorted(set(names) - set(known)):
        print(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or known:
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=FOLDER.parent).returncode
        if status:
            failed.append(f"{name} (exit {status})")
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
