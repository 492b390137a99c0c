"""Machines and slots, from files and from the command line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from det_core.launch._machines._hosts import Host, read_hostfile, read_hosts, write_hostfile
from det_core.launch._machines._place import index_of_this_machine, is_here
from det_core.launch._machines._ports import check_free, check_reachable, free_port
from det_core.launch._words._options import CannotStart, UsageError


def hostfile(folder: Path, text: str) -> str:
    (folder / "hosts").write_text(text)
    return str(folder / "hosts")


def test_a_hostfile_with_comments_blanks_and_addresses(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# two\nnode1 slots=4  # the first\n\n  10.0.0.2\tslots=2\r\nfe80::1 slots=1\nplain\n")
    found = (Host("node1", 4), Host("10.0.0.2", 2), Host("fe80::1", 1), Host("plain", 1))
    assert read_hostfile(path) == found
    assert [host.slots for host in read_hostfile(path, slots=3)] == [3, 3, 3, 3]
    assert read_hostfile(write_hostfile(str(tmp_path / "again"), found)) == found


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("node1 slots=2\nnode2 slot=2\n", ":2", "expected node2 slots=N, found 'node2 slot=2'"),
        ("node1 slots=two", ":1", "expected node1 slots=N"),
        ("node1 slots=-1", ":1", "expected node1 slots=N"),
        ("node1 slots=2 max=3", ":1", "expected node1 slots=N"),
        ("\n\nnode1 slots=0", ":3", "node1 has slots=0"),
        ("node1,node2 slots=2", ":1", "'node1,node2' is no name of a host"),
        ("-oProxyCommand=x slots=2", ":1", "is no name of a host"),
        ("node1 slots=1\nnode1 slots=2", "", "node1 stands there twice"),
        ("# nothing\n", "", "names no host"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_line(tmp_path: Path, text: str, where: str, message: str) -> None:
    path = hostfile(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_hostfile(path)
    assert f"{path}{where}" in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hostfile_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("nowhere", "No such file"), ("binary", "is not text"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=message):
            read_hostfile(str(tmp_path / name))


def test_hosts_on_the_command_line() -> None:
    assert read_hosts("a:2,b:1,c") == (Host("a", 2), Host("b", 1), Host("c", 1))
    assert read_hosts("a:2,b:1", slots=4) == (Host("a", 4), Host("b", 4))
    assert read_hosts("::1") == (Host("::1", 1),)


@pytest.mark.parametrize("text", ["", "a:2,", "a:two", "a:0", "a:2,a:2", "a b:2", "a:"])
def test_hosts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        read_hosts(text)


def test_this_machine_among_others() -> None:
    here = socket.gethostname()
    assert is_here("localhost") and is_here("127.0.0.1") and is_here(here)
    assert not is_here("203.0.113.1")  # an address for documents alone
    assert index_of_this_machine([Host("203.0.113.1", 1), Host(here, 1)], "hosts") == 1
    with pytest.raises(UsageError, match="no host of hosts is this machine"):
        index_of_this_machine([Host("203.0.113.1", 1)], "hosts")
    with pytest.raises(UsageError, match=r"several hosts of hosts .* --node-rank"):
        index_of_this_machine([Host("127.0.0.1", 1), Host("127.0.0.2", 1)], "hosts")


def test_ports_that_are_free_and_ports_that_are_not() -> None:
    check_free(free_port())
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        with pytest.raises(CannotStart, match=f"port {port} is in use .*--master-port"):
            check_free(port)
        check_reachable("127.0.0.1", port)


def test_a_machine_that_does_not_listen_yet_is_reachable_and_one_without_an_address_is_not() -> None:
    check_reachable("127.0.0.1", free_port())
    with pytest.raises(CannotStart, match=r"host no-such-host\.invalid cannot be reached from"):
        check_reachable("no-such-host.invalid", 80)
