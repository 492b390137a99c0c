#!/usr/bin/env bash
# timm.sh VENV: a venv with torch, det_core (editable), what its tests need, and what the hook of examples/timm_port
# installs, the way its README says.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=$(readlink -m "${1:?usage: timm.sh VENV}")
export PIP_DISABLE_PIP_VERSION_CHECK=1
stamp=$venv/.timm
made=$(cat "$0" "$root"/{pyproject.toml,constraints.txt,examples/timm_port/startup-hook.sh} | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$made" ]; then exit 0; fi

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet -c "$root/constraints.txt" -e "$root[torch,master,examples]" \
  'hypothesis>=6.90' 'pytest>=8' 'pytest-timeout>=2.2'
PATH=$venv/bin:$PATH bash "$root/examples/timm_port/startup-hook.sh"
"$venv/bin/python" -c 'import timm'
echo "$made" >"$stamp"
