"""The batch file, the environment of the jobs, and what is refused before anything is made."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from det_core.cli.slurm import command
from det_core.slurm import JobOptions, batch_file, submit
from det_core.slurm._script import environment_file, parse_limit

TORCH = f"{sys.executable} -m det_core.launch.torch_distributed"
TRAIN = ["python", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("4:00:00", 14400), ("2-0", 172800), ("1-1:30", 91800), ("1-0:0:5", 86405),
     ("0", math.inf), ("UNLIMITED", math.inf), ("", math.inf)],
)  # fmt: skip
def test_parse_limit_reads_every_form_of_slurm(text: str, seconds: float) -> None:
    assert parse_limit(text) == seconds


@pytest.mark.parametrize(
    ("command", "options", "full"),
    [
        ("python train.py a", {}, "python train.py a"),
        ("python train.py a", {"nodes": 2}, f"{TORCH} python train.py a"),
        ("python train.py", {"slurm": {"gpus-per-node": "a100:4"}}, f"{TORCH} python train.py"),
        ("python train.py", {"slurm": {"gpus-per-node": "1"}}, "python train.py"),
        ("./train.sh", {"ranks_per_node": 2}, f"{TORCH} --nproc-per-node 2 ./train.sh"),
        ("python3 -u -m pkg.train a", {"launcher": "deepspeed"},
         f"{sys.executable} -m det_core.launch.deepspeed python3 -u -m pkg.train a"),
        ("python -u -m torch.distributed.run train.py", {"nodes": 2}, "python -u -m torch.distributed.run train.py"),
        ("/bin/torchrun train.py", {"nodes": 2}, "/bin/torchrun train.py"),
        ("python torchrun.py", {"nodes": 2}, f"{TORCH} python torchrun.py"),
        ("python train.py", {"nodes": 2, "launcher": "none"}, "python train.py"),
    ],
)  # fmt: skip
def test_full_command_has_a_launcher_where_there_are_several_ranks(
    command: str, options: dict[str, object], full: str
) -> None:
    assert " ".join(JobOptions(command.split(), **options).full_command) == full  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (JobOptions(TRAIN, {"output": "x"}), "--sbatch output: the chain sets it itself"),
        (JobOptions(TRAIN, {"time": "10"}, stop_before=201), "at most a third of --time, 200 s"),
        (JobOptions(TRAIN, stop_before=0), "--stop-before 0: expected more than 0"),
        (JobOptions(TRAIN, max_jobs=0), "--max-jobs 0: expected at least 1"),
        (JobOptions(TRAIN, setup=["modules.sh"]), "--setup modules.sh: no such file"),
        (JobOptions(["pyhton", "train.py"]), "cannot run 'pyhton': not an executable here"),
        (JobOptions(["python", "-u", "nothere.py"]), "nothere.py: no such file"),
    ],
)
def test_submit_refuses_what_cannot_work_and_makes_nothing(home: Path, options: JobOptions, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        submit(home, options)
    assert not home.exists()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("nothere.py", {"nodes": 2}),  # by a launcher, which takes a script alone
        ("python nothere.py", {"setup": ["cd /elsewhere"]}),
        ("python -m train nothere.py", {}),
        ("env python nothere.py", {}),
    ],
)
def test_check_command_accepts_what_may_be_on_the_nodes_alone(command: str, options: dict[str, object]) -> None:
    JobOptions(command.split(), **options).check_command()  # type: ignore[arg-type]


def test_batch_file_is_a_shell_script_with_the_options_of_sbatch(tmp_path: Path) -> None:
    (tmp_path / "modules").write_text("module load cuda\n")
    options = JobOptions(
        TRAIN, {"time": "4:00:00", "exclusive": ""}, "a name", setup=["conda activate x", str(tmp_path / "modules")]
    )
    text = batch_file(options, "/a folder")
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == ["--job-name=a-name", "--nodes=1", "--ntasks-per-node=1", "--chdir='/a folder'",
                          "--time=4:00:00", "--exclusive", "--open-mode=append", "--no-requeue"]  # fmt: skip
    assert "\nconda activate x\n" in text and f"\n. {tmp_path}/modules\n" in text
    assert text.endswith(' "${1:-$0}" a-name 100 180 python train.py --lr 0.1\n')
    on_another_node = text.replace("\npython=", "\npython=/not/there")
    done = subprocess.run(["bash"], input=on_another_node, capture_output=True, text=True)
    assert (done.returncode, "has no /not/there" in done.stderr) == (127, True)


def test_script_takes_the_letters_of_sbatch_before_the_command_alone() -> None:
    words = "script -p gpu -t 1 -N 2 -c 3 -J fit -- python train.py -t 5"
    lines = CliRunner().invoke(command, words.split()).output.splitlines()
    assert {f"#SBATCH --{x}" for x in ("partition=gpu", "time=1", "nodes=2", "cpus-per-task=3", "job-name=fit")} < set(
        lines
    )
    assert lines[-1].endswith(f" fit 100 20 {TORCH} python train.py -t 5")


def test_environment_file_gives_a_shell_the_variables_of_the_submit(tmp_path: Path) -> None:
    variables = {"A": "it's\ntwo lines", "RANK": "1", "SLURM_JOB_ID": "7", "SLURM_CONF": "/c",
                 "DET_CORE_SECRET": "x" * 32, "CUDA_VISIBLE_DEVICES": "3",
                 "BASH_FUNC_module%%": "() {  echo loaded $1\n}", "LATIN": "\udce9"}  # fmt: skip
    file = tmp_path / "env.sh"
    file.write_bytes(environment_file(variables, ["RANK", "NEW=value"]))
    command = f'. {file}; module cuda; python3 -c "import os, json; print(json.dumps(dict(os.environ)))"'
    output = subprocess.check_output(["bash", "-c", command], env={"PATH": "/usr/bin:/bin"}).partition(b"\n")
    assert output[0] == b"loaded cuda"
    left_out = dict.fromkeys(["SLURM_JOB_ID", "DET_CORE_SECRET", "CUDA_VISIBLE_DEVICES"])
    expected = {**variables, "NEW": "value", **left_out}
    assert {name: json.loads(output[2]).get(name) for name in expected} == expected
    with pytest.raises(ValueError, match="--env MISSING: not set here"):
        environment_file(variables, ["MISSING"])
