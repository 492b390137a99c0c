"""``det-core master``: start, look at and stop a master."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from det_core.cli._groups import Group
from det_core.cli._options import COUNT, home_option, json_option, master_option
from det_core.cli._output import FAILED, Failure, listed, note, note_if_slow, print_facts, print_json, say
from det_core.cli.completion import complete_files

if TYPE_CHECKING:
    from det_core.client._address import Address

STATUS_TIMEOUT = 5.0
DOWN_TIMEOUT = 2.0
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
@click.option("--host", help="Address to listen on (default: 127.0.0.1, this machine alone).")
@click.option("--port", type=COUNT, metavar="N", help="Port (default: the last one, else a free one).")
@click.option("--db", metavar="URL", help="Database, such as postgresql+psycopg://… (default: a SQLite file).")
@click.option(
    "--token-file", metavar="FILE", shell_complete=complete_files, help="File with the token that clients need."
)
@click.option("--allow-host", metavar="NAME", multiple=True, help="Name by which a proxy reaches it.")
@click.option(
    "--new",
    "start_new",
    is_flag=True,
    help="Start an empty database beside what an earlier one knew, which is moved to HOME/unknown.",
)
@click.option("--foreground", is_flag=True, help="Stay here, as a service manager needs it.")
@home_option
@json_option
def up(
    slots: int | None,
    host: str | None,
    port: int | None,
    db: str | None,
    token_file: str | None,
    allow_host: Sequence[str],
    start_new: bool,
    foreground: bool,
    home: str | None,
    as_json: bool,
) -> None:
    """Start the master; leave one that runs already alone."""
    from det_core.client._embedded import ensure_master, living
    from det_core.client._runs import home_of

    folder = home_of(home)
    # The master has another working directory.
    token = token_file and str(Path(token_file).absolute())
    given = {"--slots": slots, "--host": host, "--port": port, "--db": db, "--token-file": token}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    options += [word for name in allow_host for word in ("--allow-host", name)]
    if start_new:
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
    elsewhere = outside_urls(folder / "master")
    if as_json:
        print_json({"url": url, "home": str(folder), "started": running is None, "urls_elsewhere": elsewhere})
        return
    state = "listens" if running is None else "runs already"
    say(f"the master of {folder} {state} at {url}")
    for outside in elsewhere:
        secret = token_file or str(folder / "master" / "token")
        note(f"on other machines: export DET_MASTER={outside} DET_USER_TOKEN=…, the content of {secret}")
    _note_other_master(home, folder, url)


def _note_other_master(home: str | None, folder: Path, url: str) -> None:
    """Say that commands go to the master in DET_MASTER, if that is another one."""
    from det_core._env import Environment
    from det_core.client._address import canonical

    named = Environment.read().master
    if home is None and named is not None and canonical(named) != canonical(url):
        note(f"but DET_MASTER is {named}: commands go there, unless they have --home {folder}")


@command.command(epilog=_STATUS_EPILOG)
@master_option
@home_option
@json_option
def status(master: str | None, home: str | None, as_json: bool) -> int:
    """Print whether the master runs, where, and how busy it is."""
    from det_core.client._address import locate, master_folder
    from det_core.client._embedded import has_died
    from det_core.client._runs import home_of

    address = locate(master, home=home)
    own = _own_facts(home, address)
    if address is None or (own and has_died(master_folder(home))):
        folder = home_of(home)
        if as_json:
            print_json({"running": False, "home": str(folder), "trials_without_master": sorted(living_trials(folder))})
        else:
            note(f"no master runs for {folder}; it is started when it is needed, or by `det-core master up`")
            _note_living_trials(folder)
        return FAILED
    if master:
        address = replace(address, source="--master")
    facts = _ask(address)
    if as_json:
        print_json({"running": True, "url": address.url, **own, **facts})
        return 0
    slots = f"{facts['slots_in_use']} of {facts['slots']} in use"
    if own.get("slots_as_last_time"):
        slots += ", as last time (`master up --slots` changes it)"
    print_facts(
        [
            ("master", address.url),
            ("elsewhere", " or ".join(own.get("urls_elsewhere", ())) or None),
            ("home", own.get("home")),
            ("pid", own.get("pid")),
            ("version", f"det_core {facts['version']}"),
            ("slots", slots),
            ("experiments", f"{facts['active']} active, {facts['paused']} paused"),
        ]
    )
    return 0


def _own_facts(home: str | None, address: Address | None) -> dict[str, Any]:
    """Return what the home directory knows of its own master; nothing if another one is meant."""
    from det_core.client._address import canonical, master_folder, running

    folder = master_folder(home)
    record = running(folder)
    if address is None or record is None or canonical(str(record["url"])) != address.url:
        return {}
    return {
        "home": str(folder.parent),
        "pid": record.get("pid"),
        "slots_as_last_time": record.get("slots_as_last_time"),
        "urls_elsewhere": outside_urls(folder),
    }


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
    if home is None and (elsewhere := _elsewhere(folder)):
        raise Failure(
            f"DET_MASTER is {elsewhere}, and that master is stopped where it was started. "
            f"To stop the one of {folder}: det-core master down --home {folder}"
        )
    busy = _is_busy(folder)
    stopped = stop_master(folder)
    if as_json:
        print_json({"stopped": stopped, "home": str(folder)})
    elif stopped:
        say(f"the master of {folder} has ended")
        if busy:
            note("trials that run go on; the next master finds them")
    else:
        note(f"no master runs for {folder}")
        _note_living_trials(folder)


def _elsewhere(home: Path) -> str | None:
    """Return the address in DET_MASTER, unless it is that of the home directory's own master."""
    from det_core._env import Environment
    from det_core.client._address import canonical, running

    named = Environment.read().master
    own = running(home / "master")
    is_own = own is not None and named is not None and canonical(str(own["url"])) == canonical(named)
    if is_own:
        return None
    return named


def _is_busy(home: Path) -> bool:
    """Return whether trials run; also if the master does not answer."""
    from det_core.client._address import locate
    from det_core.client._master import Master
    from det_core.errors import MasterError

    address = locate(home=home)
    if address is None:
        return False
    try:
        with Master(address, timeout=0, idle_timeout=DOWN_TIMEOUT) as master:
            return bool(master.get("master").get("slotsInUse"))
    except MasterError:
        return True  # it lives and does not answer: to say too much is better than too little


def outside_urls(folder: Path) -> list[str]:
    """Return the addresses at which other machines reach the master of a folder; none if it listens locally."""
    from det_core.client._address import running

    record = running(folder)
    if record is None:
        return []
    host = str(record.get("listens", "127.0.0.1"))
    if _is_loopback(host):
        return []
    if host in ("0.0.0.0", "::", ""):  # every address of this machine, of which any may be out of reach
        host = socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    return [f"http://{host}:{urlsplit(str(record['url'])).port}"]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback  # fe80::1%eth0
    except ValueError:
        return host == "localhost"


def living_trials(home: Path) -> dict[int, int]:
    """Return the trials of a home directory whose supervisors live: trial -> experiment."""
    return dict(_living_trials(home))


def _living_trials(home: Path) -> Iterator[tuple[int, int]]:
    for folder in (home / "master" / "allocations").glob("*/"):
        if not _is_locked(folder / "lock"):
            continue
        try:
            spec = json.loads((folder / "spec.json").read_text())
            yield int(spec["trial_id"]), int(spec["experiment_id"])
        except (OSError, ValueError, TypeError, KeyError):
            continue  # written by another version, or in part: the next master looks into it


def _is_locked(path: Path) -> bool:
    """Return whether a supervisor holds the lock of an allocation's folder."""
    try:
        with open(path, "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _note_living_trials(home: Path) -> None:
    """Say which trials go on without a master, and how to end them."""
    living = living_trials(home)
    if not living:
        return
    trials = listed(list(map(str, sorted(living))), 10)
    experiments = [str(number) for number in sorted(set(living.values()))]
    note(f"trials go on without it (trial {trials} of experiment {', '.join(experiments)})")
    kill = f"det-core experiment kill {' '.join(experiments)} --home {home}"
    note(f"to end them: {kill} (this starts the master, which finds them)")
