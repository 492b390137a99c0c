"""What the deepspeed launcher makes of a command line, without deepspeed."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from det_core._env import Environment
from det_core.launch import deepspeed
from det_core.launch._framework import Job
from det_core.launch._machines._hosts import Host
from det_core.launch._machines._place import Place
from det_core.launch._machines._ports import free_port
from det_core.launch._words._options import CannotStart
from support.launcher import launched, write

DEEPSPEED = [sys.executable, "-m", "det_core.launch.deepspeed"]
TWO = (Host("127.0.0.1", 2), Host("127.0.0.2", 1))


def job(folder: Path, place: Place, **changes: Any) -> Job:
    given: dict[str, Any] = dict(
        asked=argparse.Namespace(master_port=None), place=place, grace=60.0, theirs=[],
        wrapped=["wrapped", "@"], folder=str(folder), control=None, environment=Environment.read({}),
    )  # fmt: skip
    return Job(**{**given, **changes})


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_one_machine_meets_at_a_port_of_its_own(tmp_path: Path) -> None:
    place = Place("this machine", (Host("127.0.0.1", 3),))
    words = [deepspeed.program_words(job(tmp_path, place)) for _ in range(2)]
    assert value(words[0], "--master_port") != value(words[1], "--master_port")
    assert value(words[0], "--master_addr") == "127.0.0.1"
    assert "deepspeed.launcher.launch" in words[0] and slots(words[0]) == {"localhost": [0, 1, 2]}
    assert words[0][-4:] == ["--no_python", "--no_local_rank", "wrapped", "@"]


def slots(words: list[str]) -> Any:
    """What is told of the machines."""
    return json.loads(base64.urlsafe_b64decode(value(words, "--world_info")))


def test_options_of_deepspeed_go_to_its_front_end(tmp_path: Path) -> None:
    place = Place("this machine", (Host("127.0.0.1", 3),))
    words = deepspeed.program_words(job(tmp_path, place, theirs=["--quiet"]))
    assert Path(value(words, "--hostfile")).read_text() == "localhost slots=3\n"
    assert words[-3:] == ["--quiet", "wrapped", "@"]
    assert {"deepspeed.launcher.runner", "--no_ssh", "--no_python", "--no_local_rank"} <= set(words)


@pytest.mark.parametrize("theirs", [[], ["--quiet"]])
def test_two_machines(tmp_path: Path, theirs: list[str]) -> None:
    port = free_port()
    for node in range(2):
        words = deepspeed.program_words(job(tmp_path, Place("--hosts", TWO, node, port), theirs=theirs))
        assert (value(words, "--node_rank"), value(words, "--master_port")) == (str(node), str(port))
        assert (tmp_path / "hosts").read_text() == "127.0.0.1 slots=2\n127.0.0.2 slots=1\n"
        if not theirs:
            assert slots(words) == {"127.0.0.1": [0, 1], "127.0.0.2": [0]}


def test_a_port_in_use_and_a_host_without_an_address(tmp_path: Path) -> None:
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        with pytest.raises(CannotStart, match=f"port {port} is in use"):
            deepspeed.program_words(job(tmp_path, Place("--hosts", TWO, 0, port)))
        deepspeed.program_words(job(tmp_path, Place("--hosts", TWO, 1, port)))
    nowhere = (Host("no-such-host.invalid", 1), Host("127.0.0.1", 1))
    with pytest.raises(CannotStart, match=r"no-such-host\.invalid cannot be reached"):
        deepspeed.program_words(job(tmp_path, Place("--hosts", nowhere, 1, port)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"DET_INTER_NODE_NETWORK_INTERFACE": "ib0", "CUDA_VISIBLE_DEVICES": "2,3"}, "ib0"),
        ({"DET_INTER_NODE_NETWORK_INTERFACE": "ib0", "CUDA_VISIBLE_DEVICES": "2", "NCCL_SOCKET_IFNAME": " "}, "ib0"),
        (
            {"DET_INTER_NODE_NETWORK_INTERFACE": "ib0", "CUDA_VISIBLE_DEVICES": "2", "NCCL_SOCKET_IFNAME": "eth1"},
            "eth1",
        ),
        ({"DET_INTER_NODE_NETWORK_INTERFACE": "ib0", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "2"}, None),
    ],
)
def test_the_network_that_nccl_uses(tmp_path: Path, given: dict[str, str], expected: str | None) -> None:
    environment = Environment.read(given)
    found = deepspeed.variables(job(tmp_path, Place("here", (Host("127.0.0.1", 1),)), environment=environment), given)
    assert found.get("NCCL_SOCKET_IFNAME", given.get("NCCL_SOCKET_IFNAME")) == expected
    assert found["USE_DEEPSPEED"] == "1"
    assert found["DET_CORE_GPUS"] == given["CUDA_VISIBLE_DEVICES"]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_without_deepspeed_there_is_the_command_to_install_it(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "print('ran')")
    with launched(DEEPSPEED, "s.py", folder=tmp_path) as launcher:
        assert launcher.wait() == 1
    assert re.fullmatch(r"\[launcher\] .* needs deepspeed, which is not installed\. Install it: .*\n", launcher.err)
