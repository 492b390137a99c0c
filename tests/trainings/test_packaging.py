"""The wheel and the sdist, built and installed as README says, beside the editable install of this checkout."""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support import ROOT
from support.environments import run

EDITABLE = "editable"
WHEEL = "wheel"
LAUNCHER = "det_core.launch.torch_distributed"


@pytest.fixture(params=[EDITABLE, WHEEL])
def python(request: pytest.FixtureRequest) -> Path:
    """Return the interpreter of either way to install."""
    return Path(sys.executable) if request.param == EDITABLE else request.getfixturevalue("installed")


def modules(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.glob("det_core/**/*.py")} | {
        str(Path("det_core/launch") / p.relative_to(root / "launchers")) for p in root.glob("launchers/**/*.py")
    }


def test_the_wheel_has_every_module_and_the_launchers_as_a_folder_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        links = [i.filename for i in archive.infolist() if (i.external_attr >> 16) & 0o170000 == 0o120000]
    assert {n for n in names if n.endswith(".py")} == modules(ROOT)
    assert {n for n in names if not n.endswith(".py")} == {
        "det_core/py.typed", "det_core/llms.txt", "det_core/skills/port-a-training-script/SKILL.md",
    }  # fmt: skip
    assert "det_core/launch/torch_distributed.py" in names
    assert {n.split("/")[0] for n in names} == {"det_core"}
    assert links == []


def test_the_sdist_has_what_the_wheel_needs(dist: Path) -> None:
    (found,) = dist.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    texts = {"det_core/py.typed", "det_core/llms.txt", "det_core/skills/port-a-training-script/SKILL.md"}
    assert modules(ROOT) | texts | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_license_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_is_what_the_new_environment_imports(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-c", "import det_core; print(det_core.__file__, det_core.__version__)", cwd=tmp_path)
    path, version = done.stdout.split()
    assert Path(path).is_relative_to(installed.parent.parent)
    assert version == run(installed, "-c", "from importlib.metadata import version as v; print(v('det-core'))",
                          cwd=tmp_path).stdout.strip()  # fmt: skip


def imported(python: Path, code: str, cwd: Path) -> set[str]:
    """Return the top-level names of all modules that ``code`` imports, found or not, as the interpreter lists them."""
    lines = run(python, "-X", "importtime", "-c", code, cwd=cwd).stderr.splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("code", ["import det_core", "from det_core import core"])
def test_importing_core_imports_no_third_party_module(python: Path, code: str, tmp_path: Path) -> None:
    ours = imported(python, code, tmp_path) - imported(python, "pass", tmp_path) - {"imported package", "org"}
    assert ours - sys.stdlib_module_names == {"det_core"}


@pytest.mark.parametrize("heavy", ["asyncio", "subprocess", "http", "ssl", "multiprocessing", "email", "tempfile"])
def test_importing_core_imports_no_heavy_module(installed: Path, heavy: str, tmp_path: Path) -> None:
    assert heavy not in imported(installed, "from det_core import core", tmp_path)


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_the_launcher_shows_its_help(python: Path, where: str, tmp_path: Path) -> None:
    done = run(python, "-m", LAUNCHER, "--help", cwd=ROOT if where == "root" else tmp_path)
    assert "--nproc-per-node" in done.stdout or "--nproc_per_node" in done.stdout


def test_the_launcher_of_the_wheel_starts_a_script(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "script.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    done = run(installed, "-m", LAUNCHER, "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    assert sorted(line for line in done.stdout.splitlines() if "rank " in line) == [
        "[rank=0] rank 0", "[rank=1] rank 1",
    ]  # fmt: skip


def test_the_command_is_installed(python: Path, tmp_path: Path) -> None:
    command = python.parent / "det-core"
    assert "runs" in run(command, "--help", cwd=tmp_path).stdout
    run(command, "runs", "list", cwd=tmp_path, DET_CORE_HOME=str(tmp_path / "home"))


def test_skill_command_prints_the_texts_that_are_installed(python: Path, tmp_path: Path) -> None:
    paths = json.loads(run(python.parent / "det-core", "skill", "--json", cwd=tmp_path).stdout)
    card = ROOT / "skills" / "port-a-training-script" / "SKILL.md"
    assert Path(paths["skill"]).read_text() == card.read_text()
    assert Path(paths["skill"]).parent.name == card.parent.name
    assert Path(paths["llms"]).read_text() == (ROOT / "llms.txt").read_text()


def test_a_bare_run_works_on_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = (
        "from det_core import core\n"
        "with core.init(name='packaged') as ctx:\n"
        "    ctx.train.report_training_metrics(1, {'loss': 0.5})\n"
    )
    home = str(tmp_path / "home")
    run(installed, "-c", script, cwd=tmp_path, DET_CORE_HOME=home)
    shown = run(installed.parent / "det-core", "runs", "list", cwd=tmp_path, DET_CORE_HOME=home, COLUMNS="200")
    assert "packaged" in shown.stdout


def test_the_new_environment_has_what_the_wheel_asks_for_and_nothing_of_the_developers(
    installed: Path, tmp_path: Path
) -> None:
    names = ("torch", "fastapi", "pytest", "pandas", "sklearn", "tensorboard")
    code = f"import importlib.util as u; print(*[n for n in {names} if u.find_spec(n)])"
    assert run(installed, "-c", code, cwd=tmp_path).stdout.split() == ["torch", "fastapi"]
