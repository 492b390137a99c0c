"""``DET_CORE_SECRET_FILE``: ranks on several machines trust each other by what is in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core import core
from det_core.errors import RendezvousError
from support.ranks import running

MACHINES = {"size": 2, "local_rank": 0, "local_size": 1, "cross_size": 2, "chief_ip": "127.0.0.1"}
SCRIPT = f"""
import os
from pathlib import Path
from det_core import core
from det_core.errors import RendezvousError

rank, file = int(os.environ["RANK"]), Path(f"secret-{{os.environ['RANK']}}").absolute()
os.environ["DET_CORE_SECRET_FILE"] = str(file)

def join(secret):
    file.write_text(secret)
    port = int(os.environ["MASTER_PORT"])
    return core.DistributedContext(rank=rank, cross_rank=rank, pub_port=port, **{MACHINES})

if rank == 0:
    os.environ["DET_CORE_SECRET"] = "one secret of both"  # goes before the file
    ranks = join("never read")
else:
    try:
        join("another, as long as it\\n")
    except RendezvousError as e:
        print("refused:", e)
    ranks = join("one secret of both\\n")
print("joined", ranks.allgather(rank))
ranks.close()
"""


def test_secret_file_joins_equal_and_rejects_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with running(SCRIPT, 2, tmp_path) as ranks:
        assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)
        assert ranks.output(0) == "joined [0, 1]\n"
        refused, joined = ranks.output(1).splitlines()
        assert refused.startswith("refused: ") and "DET_CORE_SECRET" in refused
        assert joined == "joined [0, 1]"


def test_secret_file_unreadable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_CORE_SECRET_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"DET_CORE_SECRET_FILE=.*nowhere: No such file or directory"):
        core.DistributedContext.detect()


def test_secret_file_empty_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("\n")
    monkeypatch.setenv("DET_CORE_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(RendezvousError, match="export DET_CORE_SECRET="):
        core.DistributedContext(rank=1, cross_rank=1, **MACHINES)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_file", [False, True])
def test_secret_below_minimum_length_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    (tmp_path / "secret").write_text("fifteen letters\n")
    if by_file:
        monkeypatch.setenv("DET_CORE_SECRET_FILE", str(tmp_path / "secret"))
    else:
        monkeypatch.setenv("DET_CORE_SECRET", "fifteen letters")
    with pytest.raises(ValueError, match=r"DET_CORE_SECRET.*at least 16. Make one: openssl rand -hex 32"):
        core.DistributedContext.detect()
