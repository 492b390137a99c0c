"""Which words are torchrun's, which are ours, and which are the script's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from torch.distributed.run import get_args_parser

from det_core._env import Environment
from det_core.launch._machines._secret import job_secret
from det_core.launch._torchrun import HelpWanted, Parser, _processes
from det_core.launch._words._options import UsageError


def parser(**environ: str) -> Parser:
    return Parser(get_args_parser(), Environment.read(environ))


@pytest.mark.parametrize(
    ("line", "script", "arguments"),
    [
        ("train.py --a -- b", "train.py", "--a -- b"),
        ("-- train.py --a -- b", "train.py", "--a -- b"),
        ("--nproc-per-node 2 train.py -- --nproc-per-node 3", "train.py", "-- --nproc-per-node 3"),
        ("--nproc_per_node=2 --grace 5 -- python train.py -- --help", "python", "train.py -- --help"),
        ("-m pkg.train -h", "pkg.train", "-h"),
        ("--standalone -r 3 -t 0:1 train.py --grace 7", "train.py", "--grace 7"),
        ("--stand train.py", "train.py", ""),
        ("-- --odd-name.py x", "--odd-name.py", "x"),
        ("--tail 0 --verbose train.py -m x --unknown", "train.py", "-m x --unknown"),
    ],
)
def test_options_end_at_the_first_word_that_is_none(line: str, script: str, arguments: str) -> None:
    _, found, rest = parser().split(line.split())
    assert (found, rest) == (script, arguments.split())


def test_options_are_torchruns_and_ours() -> None:
    line = "--nproc-per-node 2 --max_restarts=3 --grace 7.5 --tail 0 --verbose t.py"
    args, *_ = parser().split(line.split())
    assert (args.nproc_per_node, args.max_restarts, args.grace, args.tail, args.verbose) == ("2", 3, 7.5, 0, True)
    assert args.given == {"nproc_per_node"}


def test_what_is_left_out_has_torchruns_default() -> None:
    plain = get_args_parser().parse_args(["t.py"])
    args, *_ = parser().split(["t.py"])
    assert args.given == set()
    assert {k: v for k, v in vars(args).items() if k in vars(plain)} == vars(plain)
    assert args.grace == 60


def test_a_task_has_a_process_for_each_of_its_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: dict[str, object] = dict.fromkeys(("master_url", "cluster_id", "agent_id", "task_id"), "x")
    cluster |= {"slot_ids": [0, 3, 4], "allocation_id": "1.a.1", "session_token": "s", "task_type": "COMMAND"}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    monkeypatch.setenv("DET_CORE_INFO_DIR", str(tmp_path))
    control: Any = None  # nothing is to be said
    for line, expected in (("t.py", 3), ("--nproc-per-node 2 t.py", 2)):
        args, *_ = parser().split(line.split())
        assert _processes(torch.distributed.run, args, control) == expected


def test_defaults_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PET_NPROC_PER_NODE", "3")
        args, *_ = parser(PET_NPROC_PER_NODE="3", DET_CORE_GRACE="9").split(["t.py"])
    assert (args.nproc_per_node, args.given, args.grace) == ("3", {"nproc_per_node"}, 9)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "no script"),
        ("--nproc-per-node 2", "no script"),
        ("--", "no script"),
        ("--nprocs-per-node 2 train.py", "--nprocs-per-node"),
        ("--max-restarts many train.py", "--max-restarts"),
        ("--grace -1 train.py", "--grace"),
        ("--tail some train.py", "--tail"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(line: str, named: str) -> None:
    with pytest.raises(UsageError, match=named) as error:
        parser().split(line.split())
    assert "\n" not in str(error.value)


def test_help_among_the_options() -> None:
    with pytest.raises(HelpWanted):
        parser().split(["--nproc-per-node", "2", "--help", "train.py"])


def test_a_secret_is_made_for_one_machine_and_demanded_for_several(tmp_path: Path) -> None:
    none, some = Environment(home=tmp_path), Environment(home=tmp_path, secret="s")
    first, second = (job_secret(none, machines=1, command="c")["DET_CORE_SECRET"] for _ in range(2))
    assert len(bytes.fromhex(first)) == 32 and first != second
    assert job_secret(some, machines=1, command="c") == job_secret(some, machines=2, command="c") == {}
    with pytest.raises(UsageError, match=r"(?m)^    export DET_CORE_SECRET=[0-9a-f]{64}\n    python -m x y\n"):
        job_secret(none, machines=2, command="python -m x y")
