"""Notices of a resumed run about settings and commands that differ from its earlier starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from det_core import client, core
from det_core.journal import RunFolder
from support.commands import det_core


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda: capsys.readouterr().err


def test_resume_with_other_hparams_prints_them(said: Any) -> None:
    for rate in (0.1, 0.01):
        with core.init(name="sw", hparams={"lr": rate, "depth": 3}, resume="latest") as ctx:
            ctx.train.report_training_metrics(1 if rate == 0.1 else 2, {"loss": 1.0})
    text = said()
    assert "had completed, with the hparams lr=0.1; resuming with lr=0.01\n" in text
    assert "same command" not in text
    assert [start["hparams"]["lr"] for start in client.run("latest").settings] == [0.1, 0.01]
    shown = det_core("runs", "show", "latest").stdout
    assert re.search(r"hparams.lr \(restart 0\): +0.1\n", shown)
    assert re.search(r"hparams.lr \(restart 1\): +0.01\n", shown)
    assert client.run("latest").hparams == {"lr": 0.01, "depth": 3}


def test_resume_without_hparams_prints_the_difference(said: Any) -> None:
    for hparams in ({"lr": 0.1}, None):
        with core.init(name="sw", hparams=hparams, resume="latest"):
            pass
    assert "with the hparams lr=0.1; resuming with no lr\n" in said()
    assert client.run("latest").hparams == {}
    assert re.search(r"hparams \(restart 1\): +none\n", det_core("runs", "show", "latest").stdout)


def test_resume_with_same_settings_prints_nothing(said: Any) -> None:
    for _ in range(2):
        with core.init(name="sw", hparams={"lr": float("nan")}, resume="latest") as ctx:
            ctx.set_config({"seed": 7})
    assert "resuming with" not in said()
    shown = det_core("runs", "show", "latest").stdout
    assert "(restart" not in shown and "config.seed:" in shown


def test_resume_with_other_config_or_storage_prints_it(said: Any, tmp_path: Path) -> None:
    with core.init(name="sw") as ctx:
        ctx.set_config({"seed": 7})
    with core.init(name="sw", resume="latest", checkpoint_storage=str(tmp_path / "store")) as ctx:
        ctx.set_config({"seed": 8})
        ctx.set_config({"seed": 9})
    text = said()
    assert text.count("resuming with seed=8") == 1 and "seed=9" not in text
    assert f"stored checkpoints in its own directory before, and stores them in {tmp_path / 'store'} now" in text


def test_settings_with_a_path_that_is_not_utf8_are_recorded() -> None:
    with core.init(hparams={"data": os.fsdecode(b"/data/caf\xe9")}):
        pass
    assert client.run("latest").hparams == {"data": "/data/caf?"}


INLINE = "from det_core import core\nwith core.init({arguments}) as ctx:\n    {body}\n"


def run_inline(how: str, arguments: str, folder: Path, body: str = "pass") -> subprocess.CompletedProcess[str]:
    code = INLINE.format(arguments=arguments, body=body)
    if how == "-c":
        return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    if how == "stdin":
        return subprocess.run([sys.executable, "-"], input=code, cwd=folder, capture_output=True, text=True)
    # As ipykernel does: its launcher is what was typed, and the module of the cells is another one.
    (folder / "ipykernel_launcher.py").write_text(
        "import sys, types\nmodule = sys.modules['__main__'] = types.ModuleType('__main__')\n"
        f"exec({code!r}, module.__dict__)\n"
    )
    return subprocess.run([sys.executable, "ipykernel_launcher.py"], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("how", ["-c", "stdin", "notebook"])
def test_process_without_a_script_gives_no_command_and_asks_for_a_name(how: str, tmp_path: Path) -> None:
    done = run_inline(how, "", tmp_path, "raise ValueError('mine')")
    run = client.run("latest")
    last = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("det_core: "))
    assert last.endswith(
        f'to resume it: DET_CORE_RESUME={run.run_id} in its environment, or core.init(resume="{run.run_id}")'
    )
    assert (run.name, run.argv) == (str(tmp_path), [])
    assert f'core.init(resume="{run.run_id}")' in det_core("runs", "show", "latest").stdout
    done = run_inline(how, "resume='latest'", tmp_path)
    assert "ValueError: resume='latest' needs name=" in done.stderr and len(client.runs()) == 1
    assert run_inline(how, "resume='latest', name='mine'", tmp_path).returncode == 0
    assert run_inline(how, f"resume='{run.run_id}'", tmp_path).returncode == 0


def test_script_whose_path_cannot_be_printed_needs_a_name(tmp_path: Path) -> None:
    script = tmp_path / os.fsdecode(b"caf\xe9.py")
    script.write_text("import sys\nfrom det_core import core\nwith core.init(name=sys.argv[1] or None): pass\n")
    done = subprocess.run([sys.executable, script, ""], capture_output=True, text=True)
    assert "ValueError: the script's path" in done.stderr and "pass core.init(name=)" in done.stderr
    assert client.runs() == []
    assert subprocess.run([sys.executable, script, "mine"]).returncode == 0
    assert "mine" in det_core("runs", "list").stdout


def test_run_that_has_not_started_is_created_and_takes_the_name_of_its_script(said: Any, home: Path) -> None:
    submitted = RunFolder.create(home, name="/work/train.py")
    assert client.run("latest").state == "created"
    with core.init(name="sw", resume=submitted.run_id):
        pass
    assert "was started" not in said() and "no earlier run" not in said()
    run = client.run("latest")
    assert (run.run_id, run.name, run.state) == (submitted.run_id, "sw", "completed")


def test_id_in_the_environment_comes_before_latest_in_the_script(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with core.init(name="sw") as first:
        pass
    with core.init(name="sw"):
        pass
    monkeypatch.setenv("DET_CORE_RESUME", first.run_id)
    with core.init(name="sw", resume="latest") as resumed:
        assert resumed.run_id == first.run_id
