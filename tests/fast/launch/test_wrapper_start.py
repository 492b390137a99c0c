"""What stands between torchrun's agent and a script's first line has to be up at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from det_core.launch import _wrapper


def test_the_wrapper_loads_little_and_nothing_of_others() -> None:
    folder = str(Path(_wrapper.__file__).resolve().parents[1])
    code = f"import sys; sys.path.append({folder!r}); import _wrapper._main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert done.returncode == 0, done.stderr
    assert loaded <= {*sys.stdlib_module_names, "_wrapper", "__main__"}
    assert not loaded & {"typing", "dataclasses", "inspect", "subprocess", "tempfile", "json", "logging", "shutil"}
