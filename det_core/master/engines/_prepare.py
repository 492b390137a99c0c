"""Runs a context's ``startup-hook.sh``, once for each content on this machine, before the script.

A program of its own that imports the standard library only: the supervisor runs it in the allocation's folder, so that
its output is in the trial's log, and a kill ends it. The hook runs in a virtual environment that is layered on the
Python of the trial: what it installs goes there and comes first, what is installed already is seen, and stays: pip is
told to keep PyTorch and what comes with it. The environment is kept under a name made from all that the hook can see
of the context; trials with the same content share it, and wait while one of them makes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HOOK = "startup-hook.sh"
KEPT = ("torch", "torchvision", "torchaudio", "triton", "tensorflow", "jax", "jaxlib")
_NAMED = (
    "requirements",
    "constraints",
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
    "environment.y",
    "Pipfile",
    "uv.lock",
)
_PASSING = ("PWD", "OLDPWD", "SHLVL", "_")
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, site, sys, sysconfig
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
print(json.dumps({"python": sys.version, "prefix": sys.prefix, "versions": found, "pip": u.find_spec("pip") is not None,
                  "paths": list(dict.fromkeys(paths)), "layered": sys.prefix != sys.base_prefix}))
"""


def main(folder: str, environments: str, interpreter: str) -> None:
    """Have the hook's environment made if need be, and let the allocation's script run in it.

    Args:
        folder: the allocation's folder, in whose ``work`` the hook lies.
        environments: the folder of all environments.
        interpreter: the Python to layer on.

    Raises:
        SystemExit: it failed; with the hook's status if it was the hook.
    """
    work = Path(folder) / "work"
    answer = subprocess.run(
        [interpreter, "-c", _PROBE, *KEPT], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, timeout=120
    )
    base = json.loads(answer.stdout)
    key = _key(work, base)
    place = Path(environments) / key
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{HOOK}: waiting for another trial that runs it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            _make(place, work, interpreter, base)
    _use(place, Path(folder))


def say(text: str) -> None:
    """A line of the log."""
    print(f"det_core: {text}", flush=True)


def _key(work: Path, base: object) -> str:
    """A name for all that the hook's effect depends on: itself, files it names or that describe packages, Python."""
    text = (work / HOOK).read_bytes()
    whole = any(word in (b".", b"-e.", b"./", b"./.") or word.startswith(b".[") for word in text.split())
    digest = hashlib.sha256(json.dumps(base, sort_keys=True).encode())
    for path in sorted(p for p in work.rglob("*") if p.is_file() and not p.is_symlink()):
        name = path.relative_to(work).as_posix()
        if whole or name == HOOK or path.name.startswith(_NAMED) or _names(text, path.name):
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _names(text: bytes, name: str) -> bool:
    return re.search(rb"(?<![\w.-])" + re.escape(os.fsencode(name)) + rb"(?![\w-])", text) is not None


def _make(place: Path, work: Path, interpreter: str, base: dict[str, object]) -> None:
    for part in ("venv", "context"):
        shutil.rmtree(place / part, ignore_errors=True)
    venv = place / "venv"
    pip = [] if not base["pip"] else ["--without-pip"]
    subprocess.run([interpreter, "-m", "venv", "--system-site-packages", *pip, str(venv)], check=True, timeout=300)
    python = venv / "bin" / "python"
    if base["layered"]:  # a virtual environment cannot see what is in another one by itself
        inside = next((venv / "lib").glob("python*/site-packages"))
        lines = [f"import site; site.addsitedir({path!r})" for path in base["paths"]]  # type: ignore[attr-defined]
        (inside / "_layered.pth").write_text("\n".join(lines) + "\n")
    if base["pip"]:
        for name in ("pip", "pip3"):
            (venv / "bin" / name).write_text(f'#!/bin/sh\nexec "{python}" -m pip "$@"\n')
            (venv / "bin" / name).chmod(0o755)
    kept = "".join(f"{name}=={version}\n" for name, version in base["versions"].items())  # type: ignore[attr-defined]
    (place / "kept.txt").write_text(kept)
    shutil.copytree(work, place / "context", symlinks=True)
    _run(place)
    (place / "done").touch()


def _run(place: Path) -> None:
    """Source the hook, as its like is sourced elsewhere, and note the variables that it exports."""
    before = {**os.environ, **_layer(place, os.environ.get("PATH", os.defpath))}
    kept = f"{os.environ.get('PIP_CONSTRAINT', '')} {place / 'kept.txt'}".strip()
    before |= {"PIP_CONSTRAINT": kept, "UV_CONSTRAINT": kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    shown = place / "variables.raw"
    shown.unlink(missing_ok=True)
    source = 'source "./$1" || exit; env -0 > "$2"'
    say(f"running {HOOK}")
    status = subprocess.run(
        ["bash", "-c", source, HOOK, HOOK, str(shown)], cwd=place / "context", env=before, stdin=subprocess.DEVNULL
    ).returncode
    if status != 0 or not shown.exists():
        say(f"{HOOK} failed with status {status}" if status else f"{HOOK} ended the shell")
        sys.exit(status if 0 < status < 256 else 128 - status if status else 1)
    after = dict(item.split("=", 1) for item in os.fsdecode(shown.read_bytes()).split("\0") if "=" in item)
    new = {k: v for k, v in after.items() if before.get(k) != v and k not in _PASSING}
    (place / "variables.json").write_text(json.dumps(new))


def _layer(place: Path, path: str) -> dict[str, str]:
    venv = place / "venv"
    return {"VIRTUAL_ENV": str(venv), "PATH": f"{venv / 'bin'}{os.pathsep}{path}"}


def _use(place: Path, folder: Path) -> None:
    """Let the script have what the hook has installed, exported and written."""
    file = folder / "environment"
    known = dict(item.split("=", 1) for item in os.fsdecode(file.read_bytes()).split("\0"))
    known |= _layer(place, known.get("PATH", os.defpath))
    known |= json.loads((place / "variables.json").read_text())
    aside = folder / "environment.new"
    aside.write_bytes(b"\0".join(os.fsencode(f"{k}={v}") for k, v in known.items()))
    aside.replace(file)
    for made in (place / "context").iterdir():
        with contextlib.suppress(FileExistsError):
            (folder / "work" / made.name).symlink_to(made)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, subprocess.SubprocessError) as e:
        say(f"{HOOK} could not be run: {e}")
        sys.exit(1)
