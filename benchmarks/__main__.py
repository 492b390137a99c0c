"""Run all benchmarks, or the named ones, each in a process of its own; the exit status is the number that failed.

A benchmark prints tables; a row with a bound shows whether it is met. ``python -m benchmarks.NAME --help`` describes
the measurement and its own options.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks._bench import parser

FOLDER = Path(__file__).parent


def main() -> int:
    """Run the benchmarks one after the other, and return the number that failed."""
    known = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
    options = parser(f"{__doc__}\nThere are: {', '.join(known)}", "benchmarks")
    options.add_argument("names", nargs="*", metavar="NAME", help="a benchmark (default: all)")
    args = options.parse_args()
    if unknown := sorted(set(args.names) - set(known)):
        options.error(f"no benchmark named {', '.join(unknown)}; expected: {', '.join(known)}")
    # The options of all benchmarks are flags: no value follows one of these words.
    passed_on = [word for word in sys.argv[1:] if word.startswith("--")]
    failed = {}
    for name in args.names or known:
        # In a process of its own: what one has imported and left in memory would show in the next one's figures.
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *passed_on], cwd=FOLDER.parent)
        if done.returncode:
            failed[name] = done.returncode
    if failed:
        print("bounds missed, or failed: " + ", ".join(f"{n} ({s})" for n, s in failed.items()), file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
