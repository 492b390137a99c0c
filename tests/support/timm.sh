#!/usr/bin/env bash
# timm.sh VENV BASE: a venv on top of BASE, with what the hook of examples/timm_port installs, the way its README says.
# One of its own, since torchmetrics imports whatever torchvision it finds, and this one warns.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=$(readlink -m "${1:?usage: timm.sh VENV BASE}")
base=$(readlink -m "${2:?usage: timm.sh VENV BASE}")
export PIP_COMPILE=0 PIP_DISABLE_PIP_VERSION_CHECK=1
stamp=$venv/.timm
made=$(cat "$0" "$root"/{pyproject.toml,constraints.txt,examples/timm_port/startup-hook.sh} | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$made" ]; then exit 0; fi

rm -rf "$venv"
"$base/bin/python" -m venv --without-pip "$venv"
inside() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(inside "$base")')" >"$(inside "$venv")/_base.pth"
for command in det-core pip; do
  sed "1s|.*|#!$venv/bin/python|" "$base/bin/$command" >"$venv/bin/$command"
  chmod +x "$venv/bin/$command"
done
PATH=$venv/bin:$PATH bash "$root/examples/timm_port/startup-hook.sh"
"$venv/bin/python" -c 'import timm'
echo "$made" >"$stamp"
