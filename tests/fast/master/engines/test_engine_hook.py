"""The startup hook runs once for a content, in an environment of its own that is layered on ours."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from support.engine_suite import archive, key, spec
from support.engines import Local, run, texts

HOOK = """
echo "hook $(which python)" ; echo once >> {ran}
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo 'WHERE = __file__' > $site/brought.py
echo 'made' > made-by-the-hook
export FROM_THE_HOOK="a value"
[ -f one.txt ] && sleep 0.3
true
"""
SCRIPT = (
    "import brought, orjson, os, sys;"
    "print(brought.WHERE.startswith(sys.prefix), sys.prefix != sys.base_prefix, os.environ['FROM_THE_HOOK'],"
    " open('made-by-the-hook').read().strip(), os.environ['VIRTUAL_ENV'] == sys.prefix)"
)


def test_the_hook_runs_once_and_every_trial_has_what_it_brought(tmp_path: Path) -> None:
    ran, context = tmp_path / "ran", tmp_path / "context.tgz"
    archive(context, {"startup-hook.sh": HOOK.format(ran=ran), "one.txt": "", "t.py": SCRIPT})

    async def work() -> None:
        async with Local().bench(tmp_path) as bench:
            await asyncio.gather(*(bench.engine.launch(spec(n, "python t.py", context=context)) for n in ("a", "b")))
            for name in ("a", "b"):
                exit = await bench.end_of(name)
                assert exit.status == 0, exit
                assert texts(bench, key(name))[-1] == "True True a value made True"
            assert ran.read_text() == "once\n"
            told = [text for name in ("a", "b") for text in texts(bench, key(name))]
            assert sum("running startup-hook.sh" in text for text in told) == 1
            files = {"startup-hook.sh": HOOK.format(ran=ran), "one.txt": "", "t.py": SCRIPT}
            archive(context, {**files, "t.py": SCRIPT + "\nprint('changed')"})
            await bench.engine.launch(spec("c", "python t.py", context=context))
            assert (await bench.end_of("c")).status == 0
            assert ran.read_text() == "once\n"  # the hook cannot see the script
            archive(context, {**files, "requirements.txt": "x"})
            await bench.engine.launch(spec("d", "python t.py", context=context))
            assert (await bench.end_of("d")).status == 0
            assert ran.read_text() == "once\nonce\n"

    run(work())
    subprocess.run([sys.executable, "-c", "import importlib.util as u; assert not u.find_spec('brought')"], check=True)


def test_a_hook_that_fails_says_so_and_is_tried_again(tmp_path: Path) -> None:
    context, mended = tmp_path / "context.tgz", tmp_path / "mended"
    hook = f"echo working; [ -e {mended} ] || {{ echo 'no such package' >&2; exit 5; }}"
    archive(context, {"startup-hook.sh": hook})

    async def work() -> None:
        async with Local().bench(tmp_path) as bench:
            await bench.engine.launch(spec("a", "echo script", context=context))
            exit = await bench.end_of("a")
            assert (exit.status, exit.started, exit.killed) == (5, True, False)
            assert "startup-hook.sh" in exit.detail
            assert exit.last_lines[-2:] == ("no such package", "det_core: startup-hook.sh failed with status 5")
            assert "script" not in texts(bench, key("a"))
            mended.touch()
            await bench.engine.launch(spec("b", "echo script", context=context))
            assert (await bench.end_of("b")).status == 0

    run(work())


def test_a_kill_ends_a_hook(tmp_path: Path) -> None:
    context = tmp_path / "context.tgz"
    archive(context, {"startup-hook.sh": "echo in the hook; sleep 1000"})

    async def work() -> None:
        async with Local().bench(tmp_path) as bench:
            await bench.engine.launch(spec("a", "echo script", context=context))
            await bench.line_of("a", "in the hook")
            await bench.engine.kill(key("a"))
            exit = await bench.end_of("a")
            assert exit.killed
            assert "script" not in texts(bench, key("a"))

    run(work())


def test_pip_is_told_to_keep_what_is_there(tmp_path: Path) -> None:
    context, shown = tmp_path / "context.tgz", tmp_path / "shown.json"
    python = f"import json, os; json.dump([open(os.environ['PIP_CONSTRAINT']).read()], open({str(shown)!r}, 'w'))"
    hook = f"python -c {json.dumps(python)}; which pip; pip --version"
    archive(context, {"startup-hook.sh": hook})

    async def work() -> None:
        async with Local().bench(tmp_path) as bench:
            await bench.engine.launch(spec("a", "true", context=context))
            assert (await bench.end_of("a")).status == 0
            which, version = texts(bench, key("a"))[-2:]
            assert which.startswith(str(tmp_path))
            assert version.startswith("pip ")

    run(work())
    import importlib.metadata

    assert f"torch=={importlib.metadata.version('torch')}\n" in json.loads(shown.read_text())[0]
