"""The wheel of this checkout, and environments with what it asks for and nothing else.

An environment is kept in ``.venvs`` between runs, and made anew when what it is made from has changed. It holds no
det_core: that is installed each time into an environment of its own, which finds the kept one's packages.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from support import ROOT

BUILT_FROM = ("det_core", "launchers", "skills", "llms.txt", "pyproject.toml", "README.md", "LICENSE")
README_EXTRAS = ("torch", "master", "accelerate")
ASKED = ("pyproject.toml", "constraints.txt")
"""Files that declare the packages of an environment."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that knows nothing of this process's Python, and must succeed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{words} in {cwd}:\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an sdist of this checkout and of the wheel built from that sdist alone."""
    with once(tmp_path_factory, "dist") as (folder, made):
        if not made:
            source = folder / "source"
            source.mkdir()
            for name in BUILT_FROM:
                if (ROOT / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
                else:
                    shutil.copy(ROOT / name, source / name)
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """Return the path of the wheel."""
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel and the extras that README asks for alone."""
    with once(tmp_path_factory, "installed") as (folder, made):
        return folder / "bin" / "python" if made else install(wheel, folder, *README_EXTRAS)


def install(wheel: Path, folder: Path, *extras: str, python: Path | None = None, more: tuple[str, ...] = ()) -> Path:
    """Make an environment in ``folder`` with the wheel and what it and its extras ask for; return its interpreter.

    Args:
        wheel: det_core's.
        folder: a new one.
        extras: of the wheel.
        python: the interpreter of the environment. Defaults to this one.
        more: what is installed beside, as pip takes it.
    """
    packages = _packages(wheel, extras, more, python or Path(sys.executable))
    made = _environment(folder, python or Path(sys.executable))
    run(*PIP, "--python", made, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (_site(folder) / "packages.pth").write_text(f"{packages}\n")
    return made


def _packages(wheel: Path, extras: tuple[str, ...], more: tuple[str, ...], python: Path) -> Path:
    """Return the directory of the packages that the wheel with these extras needs."""
    name = "-".join(("wheel", _version(python), *(extras or ("bare",)), *(("more",) if more else ())))
    folder = ROOT / ".venvs" / name
    key = hashlib.sha256(repr((more, [(ROOT / file).read_bytes() for file in ASKED])).encode()).hexdigest()
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        stamp = folder / ".made-from"
        if not stamp.exists() or stamp.read_text() != key:
            shutil.rmtree(folder, ignore_errors=True)
            made = _environment(folder, python)
            asked = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
            pip = [*PIP, "--python", made]
            run(*pip, "install", "--no-compile", "-c", ROOT / "constraints.txt", asked, *more, cwd=folder)
            run(*pip, "uninstall", "--yes", "det-core", cwd=folder)
            stamp.write_text(key)
    return _site(folder)


def _environment(folder: Path, python: Path) -> Path:
    """Create an empty environment and return its interpreter."""
    if python == Path(sys.executable):
        venv.create(folder, symlinks=True)
    else:
        run(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def _site(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


@functools.cache
def _version(python: Path) -> str:
    """Return its number: ``3.11``."""
    return run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])", cwd=ROOT).stdout.strip()


@contextmanager
def once(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a directory shared by all workers of this test run, and whether one has filled it; one worker at a time."""
    base = factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / name
    stamp = folder.with_suffix(".made")
    with FileLock(f"{folder}.lock"):
        made = stamp.exists()
        if not made:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        yield folder, made
        stamp.touch()
