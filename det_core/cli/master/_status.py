"""``det-core master status``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core.cli._say import note, print_json
from det_core.cli._status import FAILED
from det_core.cli.master._elsewhere import addresses_elsewhere
from det_core.cli.master._orphans import living_trials, tell_living_trials
from det_core.client._address import master_folder

if TYPE_CHECKING:
    from det_core.client._address import Address

PATIENCE = 5.0
"""Seconds that an answer may take."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--master", metavar="URL", help="a master's address (default: DET_MASTER, else the home's own)")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.epilog = "The exit status is 0 if a master runs, else 1. No master is started."
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Say whether the master runs, and what it does."""
    from det_core.client._address import locate
    from det_core.client._find import home_of

    address = locate(args.master, home=args.home)
    if address is None or _is_dead(args, address):
        home = home_of(args.home)
        if args.json:
            print_json({"running": False, "home": str(home), "trials_without_master": sorted(living_trials(home))})
        else:
            note(f"no master runs for {home}; it is started when it is needed, or by `det-core master up`")
            tell_living_trials(home)
        return FAILED
    if args.master:
        address = replace(address, source="--master")
    told = _asked(address)
    local = _local(args, address)
    if args.json:
        print_json({"running": True, "url": address.url, **local, **told})
        return 0
    facts = {
        "master": address.url,
        **({"elsewhere": " or ".join(local["urls_elsewhere"])} if local.get("urls_elsewhere") else {}),
        **({"home": local["home"], "pid": str(local["pid"])} if local else {}),
        "version": f"det_core {told['version']}",
        "slots": _slots(told, local),
        "experiments": f"{told['active']} active, {told['paused']} paused",
    }
    for name, value in facts.items():
        print(f"{name + ':':<12} {value}")
    return 0


def _slots(told: dict[str, Any], local: dict[str, Any]) -> str:
    last = ", as last time (`master up --slots` changes it)" if local.get("slots_as_last_time") else ""
    return f"{told['slots_in_use']} of {told['slots']} in use{last}"


def _asked(address: Address) -> dict[str, Any]:
    from det_core.client._answers import plain
    from det_core.client._master import Master

    with Master(address, timeout=0, idle_timeout=PATIENCE) as master:
        said = plain(master.get("master"))
        states = [
            len(master.get("experiments", states=[state])["experiments"]) for state in ("STATE_ACTIVE", "STATE_PAUSED")
        ]
    return {
        "version": said.get("product_version", said.get("version")),
        "cluster_id": said.get("cluster_id"),
        "slots": said.get("slots"),
        "slots_in_use": said.get("slots_in_use"),
        "active": states[0],
        "paused": states[1],
    }


def _is_dead(args: argparse.Namespace, address: Address) -> bool:
    """Whether it is the home folder's own, and has died without a word."""
    from det_core.client._embedded import has_died

    return bool(_local(args, address)) and has_died(master_folder(args.home))


def _local(args: argparse.Namespace, address: Address) -> dict[str, Any]:
    """What is known of it if it is the one of the home folder."""
    from det_core.client._address import canonical, running

    folder: Path = master_folder(args.home)
    said = running(folder)
    if said is None or canonical(str(said["url"])) != address.url:
        return {}
    return {
        "home": str(folder.parent),
        "pid": said.get("pid"),
        "slots_as_last_time": said.get("slots_as_last_time"),
        "urls_elsewhere": addresses_elsewhere(folder),
    }
