"""The process of a search ends with the process that started it, whatever the search does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from det_core._standalone.processes import start_time
from support.processes import until

METHOD = """
import os, pathlib, re
from det_core.search import SearchMethod

class Stuck(SearchMethod):
    def handle(self, event):
        pathlib.Path("pid.new").write_text(str(os.getpid()))
        os.rename("pid.new", "pid")
        re.match("(a+)+$", "a" * 64 + "b")  # holds the interpreter, so that no thread of it runs
"""
PARENT = """
import os, subprocess, sys, time
from det_core.search._events import Started
from det_core.search._worker import encode
code = f"from det_core.search._worker import main; main({os.getpid()})"
worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
searcher = {"name": "custom", "class": "stuck:Stuck", "metric": "loss"}
worker.stdin.write(encode({"create": [searcher, {}, 0, os.getcwd()], "record": []}))
worker.stdin.write(encode({"event": Started().to_dict()}))
worker.stdin.flush()
time.sleep(600)
"""


def test_process_of_a_search_that_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(METHOD)
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path) as parent:
        until((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert start_time(pid) is not None
        parent.kill()
    until(lambda: start_time(pid) is None)
