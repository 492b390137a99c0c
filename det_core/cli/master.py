"""``det-core master``: start, look at and stop a master."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from det_core.cli._groups import Group
from det_core.cli._options import COUNT, home_option, json_option, master_option
from det_core.cli._output import FAILED, Failure, note, note_if_slow, print_facts, print_json, say

if TYPE_CHECKING:
    from det_core.client._master import Address

STATUS_TIMEOUT = 5.0
"""Seconds that a master may take to answer."""
_EXAMPLES = """\
The embedded master of DET_CORE_HOME needs none of this: the commands start it when they need it, and it runs until
`det-core master down`. Start it yourself to set how many trials may run at a time, or to serve other machines.

examples:
  det-core master up --slots 4                             four slots on a machine without GPUs
  det-core master up --host 0.0.0.0 --port 8080 --token-file ~/token
                                                           for other machines: there DET_MASTER=http://HOST:8080
  det-core master status
  det-core master down                                     trials go on; the next master finds them"""
_STATUS_EPILOG = "The exit status is 0 if a master runs, else 1. No master is started."


@click.group("master", cls=Group, epilog=_EXAMPLES)
def command() -> None:
    """Start, look at and stop the master of a home directory."""


@command.command()
@click.option(
    "--slots", type=COUNT, metavar="N", help="Slots of this machine (default: as last time, else its GPUs, else 1)."
)
@click.option("--host", metavar="ADDRESS", help="Address to listen on (default: 127.0.0.1, this machine alone).")
@click.option("--port", type=COUNT, metavar="N", help="Port (default: the last one, else a free one).")
@click.option("--db", metavar="URL", help="Database, such as postgresql+psycopg://… (default: a SQLite file).")
@click.option("--token-file", metavar="FILE", type=click.Path(), help="File with the token that clients need.")
@click.option("--allow-host", metavar="NAME", multiple=True, help="Name by which a proxy reaches it.")
@click.option(
    "--new",
    is_flag=True,
    help="Start an empty database beside what an earlier one knew, which is moved to HOME/unknown.",
)
@click.option("--foreground", is_flag=True, help="Stay here, as a service manager needs it.")
@home_option
@json_option
def up(
    token_file: str | None,
    allow_host: Sequence[str],
    new: bool,
    foreground: bool,
    home: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Start the master; leave one that runs already alone."""
    from det_core.client._embedded import ensure_master, living
    from det_core.client._runs import home_of

    folder = home_of(home)
    if token_file is not None:
        given["token-file"] = Path(token_file).absolute()  # the master has another working directory
    options = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    options += [word for name in allow_host for word in ("--allow-host", name)]
    if new:
        options.append("--new")
    running = living(folder / "master")
    if running is not None and (options or foreground):
        text = f"the master of {folder} runs already at {running['url']}; to restart it, first: det-core master down"
        raise Failure(text)
    if foreground:
        command_line = [sys.executable, "-m", "det_core.master", "--home", str(folder), *options]
        os.execv(sys.executable, command_line)  # so that a service manager's signals reach it
    with note_if_slow("starting the master …"):
        url, _ = ensure_master(folder, options=options)
    elsewhere = _urls_elsewhere(folder / "master")
    if as_json:
        print_json({"url": url, "home": str(folder), "started": running is None, "urls_elsewhere": elsewhere})
        return
    state = "listens" if running is None else "runs already"
    say(f"the master of {folder} {state} at {url}")
    for outside in elsewhere:
        secret = token_file or str(folder / "master" / "token")
        note(f"on other machines: export DET_MASTER={outside} DET_USER_TOKEN=…, the content of {secret}")
    if other := _other_master(home, folder):
        note(f"but DET_MASTER is {other}: commands go there, unless they have --home {folder}")


@command.command(epilog=_STATUS_EPILOG)
@master_option
@home_option
@json_option
def status(master: str | None, home: str | None, as_json: bool) -> int:
    """Print whether the master runs, where, and how busy it is."""
    from det_core._info import canonical_url
    from det_core.client._embedded import has_died
    from det_core.client._master import locate, master_folder, running

    folder = master_folder(home)
    address = locate(master, home=home)
    record = running(folder)
    is_own = address is not None and record is not None and canonical_url(str(record["url"])) == address.url
    if address is None or (is_own and has_died(folder)):
        if as_json:
            print_json({"running": False, "home": str(folder.parent)})
        else:
            note(f"no master runs for {folder.parent}; it is started when it is needed, or by `det-core master up`")
        return FAILED
    if master:
        address = replace(address, source="--master")
    facts: dict[str, Any] = {"running": True, "url": address.url}
    if is_own and record is not None:
        facts |= {name: record.get(name) for name in ("pid", "slots_as_last_time")}
        facts |= {"home": str(folder.parent), "urls_elsewhere": _urls_elsewhere(folder)}
    facts |= _ask(address)
    if as_json:
        print_json(facts)
        return 0
    slots = f"{facts['slots_in_use']} of {facts['slots']} in use"
    if facts.get("slots_as_last_time"):
        slots += ", as last time (`master up --slots` changes it)"
    print_facts(
        [
            ("master", address.url),
            ("elsewhere", " or ".join(facts.get("urls_elsewhere", ())) or None),
            ("home", facts.get("home")),
            ("pid", facts.get("pid")),
            ("version", f"det_core {facts['version']}"),
            ("slots", slots),
            ("experiments", f"{facts['active']} active, {facts['paused']} paused"),
        ]
    )
    return 0


def _ask(address: Address) -> dict[str, Any]:
    from det_core.client._master import Master
    from det_core.protocol.wire import from_wire

    with Master(address, timeout=0, idle_timeout=STATUS_TIMEOUT) as master:
        about = from_wire(master.get("master"))
        counts = {
            state: master.get("experiments", states=[f"STATE_{state.upper()}"], limit=1)["pagination"]["total"]
            for state in ("active", "paused")
        }
    version = about.get("product_version", about.get("version"))
    return {"version": version, **{key: about.get(key) for key in ("cluster_id", "slots", "slots_in_use")}, **counts}


@command.command()
@home_option
@json_option
def down(home: str | None, as_json: bool) -> None:
    """Stop the master; trials go on."""
    from det_core.client._embedded import stop_master
    from det_core.client._runs import home_of

    folder = home_of(home)
    if other := _other_master(home, folder):
        raise Failure(
            f"DET_MASTER is {other}, and that master is stopped where it was started. "
            f"To stop the one of {folder}: det-core master down --home {folder}"
        )
    stopped = stop_master(folder)
    if as_json:
        print_json({"stopped": stopped, "home": str(folder)})
    elif stopped:
        say(f"the master of {folder} has ended")
        note("trials that run go on; the next master finds them")
    else:
        note(f"no master runs for {folder}")


def _other_master(home: str | None, folder: Path) -> str | None:
    """Return the address in DET_MASTER, if commands without --home go there and not to the home directory's master."""
    from det_core._env import Environment
    from det_core._info import canonical_url
    from det_core.client._master import running

    named = Environment.read().master
    if home is not None or named is None:
        return None
    own = running(folder / "master")
    if own is not None and canonical_url(str(own["url"])) == canonical_url(named):
        return None
    return named


def _urls_elsewhere(folder: Path) -> list[str]:
    """Return the address at which other machines reach the master of a folder; none if it listens locally."""
    from det_core.client._master import running

    record = running(folder) or {}
    host = str(record.get("listens", "localhost"))
    if host.startswith("127.") or host in ("::1", "localhost"):
        return []
    if host in ("0.0.0.0", "::", ""):  # every address of this machine, of which any may be out of reach
        host = socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    return [f"http://{host}:{urlsplit(str(record['url'])).port}"]
