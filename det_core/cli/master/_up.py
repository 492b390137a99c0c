"""``det-core master up``."""

from __future__ import annotations

import argparse
from pathlib import Path

from det_core.cli._say import count, error, note, noted_if_slow, print_json
from det_core.cli._status import FAILED
from det_core.cli.master._elsewhere import addresses_elsewhere


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--slots", type=count, metavar="N", help="slots of this machine (default: as last time, else its GPUs, else 1)"
    )
    parser.add_argument("--host", help="the address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=count, metavar="N", help="the port (default: the last one, else a free one)")
    parser.add_argument("--db", metavar="URL", help="its database, as postgresql+psycopg://… (default: a SQLite file)")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token that clients have to show")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that a proxy reaches it by",
    )
    parser.add_argument("--foreground", action="store_true", help="stay here, as a service manager wants it")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Start the master; one that runs already is left alone."""
    from det_core._env import Environment
    from det_core.client._address import canonical
    from det_core.client._embedded import ensure_master, living
    from det_core.client._find import home_of

    home = home_of(args.home)
    options = _options(args)
    found = living(home / "master")
    if found is not None and (options or args.foreground):
        error(f"the master of {home} runs already at {found['url']}: `det-core master down` first, to start it anew")
        return FAILED
    if args.foreground:
        _become(home, options)
    with noted_if_slow("starting the master …"):
        url, _ = ensure_master(home, options=options)
    elsewhere = addresses_elsewhere(home / "master")
    if args.json:
        print_json({"url": url, "home": str(home), "started": found is None, "urls_elsewhere": elsewhere})
        return 0
    print(f"the master of {home} {'runs already' if found is not None else 'listens'} at {url}")
    if elsewhere:
        first, *more = elsewhere
        note(f"on other machines: export DET_MASTER={first} DET_USER_TOKEN=…, the content of {_token(args, home)}")
        if more:
            note(f"if that address is not reached from there: {' or '.join(more)}")
    if args.home is None and (named := Environment.read().master) is not None and canonical(named) != canonical(url):
        note(f"but DET_MASTER is {named}: commands go there, unless they have --home {home}")
    return 0


def _options(args: argparse.Namespace) -> list[str]:
    given = (("--slots", args.slots), ("--host", args.host), ("--port", args.port), ("--db", args.db))
    options = [word for name, value in given if value is not None for word in (name, str(value))]
    if args.token_file is not None:
        options += ["--token-file", str(Path(args.token_file).absolute())]
    return options + [word for name in args.allow_host for word in ("--allow-host", name)]


def _token(args: argparse.Namespace, home: Path) -> str:
    return args.token_file or str(home / "master" / "token")


def _become(home: Path, options: list[str]) -> None:
    import os
    import sys

    os.execv(sys.executable, [sys.executable, "-m", "det_core.master", "--home", str(home), *options])
