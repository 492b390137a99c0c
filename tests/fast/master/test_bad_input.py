"""Bad input, from the person's or the script's end to the master's process, and back."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from det_core.cli import main
from support.jobs import Jobs
from support.real_master import RealMaster

SIX = """
name: six
entrypoint: python train.py
hyperparameters:
  lr: {type: log, base: 10, minval: -1, maxval: -4}
  width: {type: categorical, vals: []}
searcher:
  name: adaptive_ahsa
  metric: loss
  max_trials: 4
  max_length: 8
max_restarts: -1
resources: {slots_per_trial: many}
enviroment: {}
"""
GOOD = {"name": "good", "entrypoint": "true", "searcher": {"name": "single", "metric": "loss", "max_length": 1}}


@pytest.fixture
def jobs(real: RealMaster) -> Iterator[Jobs]:
    made = Jobs(real)
    yield made
    made.close()


@pytest.fixture
def typed(
    real: RealMaster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Types a command; its status, and what it prints."""
    monkeypatch.setenv("DET_MASTER", real.url)
    monkeypatch.setenv("DET_USER_TOKEN", real.token)

    def types(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        said = capsys.readouterr()
        return status, said.out, said.err

    return types


def test_six_mistakes_are_six_lines(typed: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "six.yaml").write_text(SIX)
    status, out, err = typed("experiment", "create", str(tmp_path / "six.yaml"))
    assert (status, out) == (2, "")
    lines = [line.removeprefix("det-core: error: ") for line in err.splitlines()]
    named = ("enviroment", "hyperparameters.lr", "hyperparameters.width", "max_restarts", "resources.", "searcher.name")
    assert sorted(next(n for n in named if line.startswith(n)) for line in lines) == sorted(named)
    assert all("it must be" in line or "did you mean environment?" in line for line in lines), err


def test_more_slots_than_there_are_says_what_to_type(
    typed: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "good.yaml").write_text(json.dumps(GOOD))
    status, _, err = typed("experiment", "create", str(tmp_path / "good.yaml"), "--slots", "3")
    assert status == 2
    assert err == (
        "det-core: error: resources.slots_per_trial is 3: this master has 2 slot(s); for more, "
        "det-core master down, and det-core master up --slots 3\n"
    )


def test_a_script_that_is_not_packed_is_told_at_once(
    typed: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "good.yaml").write_text(json.dumps({**GOOD, "entrypoint": "python train.py"}))
    (tmp_path / "project" / "sub").mkdir(parents=True)
    (tmp_path / "project" / "sub" / "train.py").touch()
    create = ("experiment", "create", str(tmp_path / "good.yaml"))
    status, _, err = typed(*create, "--check")
    assert status == 2
    assert "error: entrypoint: it runs train.py, and there is no such file in the context directory" in err
    assert "det-core experiment create CONFIG DIR" in err
    status, _, err = typed(*create, str(tmp_path / "project"))
    assert status == 2
    assert ".detignore" in err
    (tmp_path / "project" / "startup-hook.sh").write_text("cp sub/train.py .\n")
    status, _, err = typed(*create, str(tmp_path / "project"), "--check")
    assert status == 0
    assert "warning: entrypoint: it runs train.py" in err
    assert typed(*create, str(tmp_path / "project" / "sub"), "--check")[2] == ""


def tgz(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def info(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, linkname
    return made


def eleven_gigabytes() -> bytes:
    """Its header says so; what would follow is not even looked at."""
    made = tarfile.TarInfo("zeros")
    made.size = 11 << 30
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(made.tobuf()) + packer.flush()


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (tgz((info("../out"), b"x")), "'../out'"),
        (tgz((info("sub/../../out"), b"x")), "'sub/../../out'"),
        (tgz((info("/out"), b"x")), "absolute"),
        (tgz((info("link", tarfile.SYMTYPE, "/etc/passwd"), b"")), "'link'"),
        (tgz((info("link", tarfile.SYMTYPE, ".."), b""), (info("link/out"), b"x")), "'link"),
        (tgz((info("link", tarfile.LNKTYPE, "../../token"), b"")), "'link'"),
        (tgz((info("device", tarfile.CHRTYPE), b"")), "'device'"),
        (eleven_gigabytes(), "10 GiB"),
    ],
    ids=["above", "hidden above", "absolute", "link", "through a link", "hard link", "device", "11 GiB"],
)
def test_an_archive_that_would_reach_out_is_refused(real: RealMaster, packed: bytes, why: str) -> None:
    before = sorted(path.name for path in real.home.parent.iterdir())
    answer = real.ask("POST", "experiments", {"config": json.dumps(GOOD), "b64Tgz": base64.b64encode(packed).decode()})
    assert answer.status_code in (400, 413), answer.text
    assert why in answer.json()["error"]["error"], answer.text
    assert sorted(path.name for path in real.home.parent.iterdir()) == before


def test_a_trials_token_opens_nothing_of_another_trial(jobs: Jobs) -> None:
    """A script that tries what it can with the credentials it was given."""
    script = """
import json, requests
from det_core import get_cluster_info
info = get_cluster_info()
other, (path, name) = hparams["trial"], hparams["checkpoint"]
headers = {"Authorization": f"Bearer {info.session_token}"}
own = f"trials/{info.trial.trial_id}"
tries = [
    ("GET", own, None), ("POST", f"{own}/progress", 0.5),
    ("GET", f"trials/{other}", None), ("POST", f"trials/{other}/progress", 0.5), ("POST", f"trials/{other}/kill", None),
    ("POST", "journal", {"trialId": other, "trialRunId": 1, "rank": 0, "records": []}),
    ("POST", "runs/start", {"runId": other}), ("GET", f"checkpoints/{name}", None),
    ("DELETE", "checkpoints", {"checkpointUuids": [name]}), ("GET", f"{path}/logs", None),
    ("POST", f"experiments/{info.trial.experiment_id}/kill", None), ("POST", "experiments", {"config": "{}"}),
]
found = [
    requests.request(m, f"{info.master_url}/api/v1/{p}", headers=headers, data=json.dumps(b), timeout=30).status_code
    for m, p, b in tries
]
sign("found", json.dumps(found))
"""
    (first,) = jobs.ended(jobs.create("with begin() as ctx:\n    count(ctx)\n"), "COMPLETED")
    known = [f"trials/{first.id}", first.latest_checkpoint]
    jobs.ended(jobs.create(script, hyperparameters={"trial": first.id, "checkpoint": known}), "COMPLETED")
    assert json.loads(jobs.sign("found")) == [200, 200] + [403] * 10
    (kept,) = [c for c in first.refresh().checkpoints() if c["uuid"] == first.latest_checkpoint]
    assert kept["state"] == "COMPLETED"


def test_a_public_address_without_a_token_is_refused(home: Path) -> None:
    command = [sys.executable, "-m", "det_core.cli", "master", "up", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--token-file" in done.stderr and "Traceback" not in done.stderr
    assert not (home / "master" / "master.json").exists()
