"""Startup hooks run at each start, in an environment of the run's own that is layered on ours."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from det_core.master.engines import Cause
from support.engine_suite import archive, key, spec
from support.engines import Local, run, texts

HOOK = """
echo "hook of $DET_TRIAL_ID"
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "WHERE = __file__" > $site/brought.py
mkdir -p outputs
export RUN=trial-$DET_TRIAL_ID
"""
SCRIPT = """
import brought, orjson, os, sys
from pathlib import Path
assert brought.WHERE.startswith(sys.prefix) and sys.prefix == os.environ["VIRTUAL_ENV"] != sys.base_prefix
model = Path("outputs/model.txt")
print(os.environ["RUN"], model.exists())
model.write_text("trained")
"""


def test_hook_exports_files_and_packages_stay_in_their_run(tmp_path: Path) -> None:
    context = tmp_path / "context.tgz"
    archive(context, {"startup-hook.sh": HOOK, "t.py": SCRIPT})

    async def work() -> None:
        async with Local().bench(tmp_path) as bench:
            specs = [replace(spec(f"a{n}", "python t.py", context=context), trial_id=n) for n in (11, 22)]
            await asyncio.gather(*(bench.engine.launch(one) for one in specs))
            for n in (11, 22):
                exit = await bench.end_of(f"a{n}")
                assert exit.status == 0, exit
                assert texts(bench, key(f"a{n}")) == [f"hook of {n}", f"trial-{n} False"]
            venv = tmp_path / "home" / "master" / "allocations" / key("a11") / "venv"
            assert venv.is_dir()
            await bench.engine.forget(key("a11"))
            assert not venv.exists()

    run(work())
    subprocess.run([sys.executable, "-c", "import importlib.util as u; assert not u.find_spec('brought')"], check=True)


async def test_hook_that_fails_ends_the_run_with_its_status(tmp_path: Path) -> None:
    context = tmp_path / "context.tgz"
    async with Local().bench(tmp_path) as bench:
        for name, hook in {"exit": "echo why >&2; exit 5", "last": "echo why >&2; (exit 5)"}.items():
            archive(context, {"startup-hook.sh": hook})
            await bench.engine.launch(spec(name, "echo script", context=context))
            exit = await bench.end_of(name)
            assert (exit.status, exit.cause) == (5, Cause.NONE)
            assert exit.last_lines == ("why", "startup-hook.sh exited with status 5")


async def test_hook_has_a_pip_that_installs_into_its_run(tmp_path: Path) -> None:
    context = tmp_path / "context.tgz"
    hook = (
        "which pip; pip install -q --no-index --no-build-isolation ./mine && python -c 'import mine; print(mine.HERE)'"
    )
    setup = "from setuptools import setup; setup(name='mine', version='1', py_modules=['mine'])"
    files = {"startup-hook.sh": hook, "mine/setup.py": setup, "mine/mine.py": "HERE = __file__"}
    archive(context, files)
    async with Local().bench(tmp_path) as bench:
        await bench.engine.launch(spec("a", "true", context=context))
        exit = await bench.end_of("a")
        assert exit.status == 0, exit
        which, *_, where = texts(bench, key("a"))
        assert which.startswith(str(tmp_path)) and where.startswith(str(tmp_path))
