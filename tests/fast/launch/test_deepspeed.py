"""The deepspeed launcher: the variables of its ranks, and its options, without deepspeed."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core._env import Environment
from det_core.launch import _ports, deepspeed
from det_core.launch._cli import Parser
from det_core.launch._hosts import CannotStart, Host, Layout
from support.launcher import launched, write
from support.processes import free_port

DEEPSPEED = [sys.executable, "-m", "det_core.launch.deepspeed"]
TWO = (Host("127.0.0.1", 2), Host("127.0.0.2", 1))
SAYS = """
    import os
    path = os.environ.get("DET_DEEPSPEED_HOSTFILE_PATH", "")
    print(os.environ["RANK"], oct(os.stat(os.path.dirname(path)).st_mode), path, open(path).read().split())
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide an importable deepspeed, which is all that the launcher checks, and close the ports that it reserves."""
    reserved = []
    reserve = _ports.reserve

    def recorded(port: int) -> socket.socket:
        held = reserve(port)
        reserved.append(held.fileno())
        return held

    monkeypatch.setattr(_ports, "reserve", recorded)
    for name in ("deepspeed", "torch"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    yield
    for fd in reserved:
        os.close(fd)


def variables(layout: Layout, *options: str, **environ: str) -> list[dict[str, str]]:
    """Return the variables of this node's ranks."""
    command_line = Parser(deepspeed.FRAMEWORK).split([*options, "--no-python", "true"])
    return deepspeed.variables(layout, command_line, Environment.read(environ))


@pytest.mark.usefixtures("installed")
def test_variables_of_one_node_use_a_port_of_their_own() -> None:
    place = Layout("this machine", (Host("127.0.0.1", 3),))
    first, second = variables(place), variables(place)
    assert [rank["RANK"] for rank in first] == [rank["LOCAL_RANK"] for rank in first] == ["0", "1", "2"]
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    expected = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3", "LOCAL_SIZE": "3", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    assert expected.items() <= first[2].items() and first[2]["USE_DEEPSPEED"] == "1"


@pytest.mark.usefixtures("installed")
def test_variables_of_two_nodes_agree() -> None:
    port = free_port()
    (last,) = variables(Layout("--hosts", TWO, 1, port))
    assert (last["RANK"], last["LOCAL_RANK"], last["WORLD_SIZE"], last["LOCAL_SIZE"]) == ("2", "0", "3", "1")
    assert (last["CROSS_RANK"], last["MASTER_ADDR"], last["MASTER_PORT"]) == ("1", "127.0.0.1", str(port))
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        with pytest.raises(CannotStart, match=f"port {port} is in use"):
            variables(Layout("--hosts", TWO, 0, port))
        assert variables(Layout("--hosts", TWO, 1, port)), "the first one's matters"


@pytest.mark.usefixtures("installed")
def test_hostfile_is_private_and_removed_with_the_job(tmp_path: Path) -> None:
    write(tmp_path, "says.py", SAYS)
    (tmp_path / "tmp").mkdir()
    words = ["--hosts", "127.0.0.1:1,127.0.0.2:2", "--node-rank", "1", "--master-port", str(free_port()), "says.py"]
    with launched(DEEPSPEED, *words, folder=tmp_path, TMPDIR=str(tmp_path / "tmp")) as job:
        assert job.wait() == 0, job.err
    found = re.findall(r"\[rank=\d\] (\d) (\S+) (\S+) (.*)", job.out)
    assert {(rank, mode) for rank, mode, *_ in found} == {("1", "0o40700"), ("2", "0o40700")}
    assert {hosts for *_, hosts in found} == {"['127.0.0.1', 'slots=1', '127.0.0.2', 'slots=2']"}
    assert str(tmp_path / "tmp") in found[0][2] and not list((tmp_path / "tmp").iterdir())
    assert "DET_CORE_SECRET is not set" in job.err


@pytest.mark.usefixtures("installed")
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
def test_variables_with_gpus_set_the_network_interface(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in ("DET_INTER_NODE_NETWORK_INTERFACE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    (found,) = variables(Layout("here", (Host("127.0.0.1", 1),)), **given)
    assert found.get("NCCL_SOCKET_IFNAME", given.get("NCCL_SOCKET_IFNAME")) == expected


def test_add_options_accepts_the_spellings_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Parser(deepspeed.FRAMEWORK)
    asked = parser.split(["-H", "hosts", "--num_gpus", "3", "--num_nodes=2", "--no-python", "true"]).options
    assert (asked.hostfile, asked.nproc_per_node, asked.nnodes) == ("hosts", 3, 2)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_launcher_without_deepspeed_shows_the_install_command(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "print('ran')")
    with launched(DEEPSPEED, "s.py", folder=tmp_path) as launcher:
        assert launcher.wait() == 1
    assert re.fullmatch(r"\[launcher\] .* needs deepspeed, which is not installed\. Install it: .*\n", launcher.err)
