#!/usr/bin/env bash
# frameworks.sh VENV [CACHE]: a venv with torch, horovod (gloo, no MPI), deepspeed, and det_core (editable).
#
# Wheels that have to be compiled, and the extension that deepspeed compiles at its first use, are kept in CACHE
# (default: det-core-wheels in the user's cache), so that this is done once. Two minutes then, else seconds.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=$(readlink -m "${1:?usage: frameworks.sh VENV [CACHE]}")
cache=$(readlink -m "${2:-${XDG_CACHE_HOME:-$HOME/.cache}/det-core-wheels}")
mkdir -p "$cache" "$(dirname "$venv")"
exec 9>"$cache/lock"
flock 9 # two runs at a time would compile everything twice

export PIP_COMPILE=0 PIP_DISABLE_PIP_VERSION_CHECK=1 DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$cache/torch_extensions
HOROVOD=0.28.1
DEEPSPEED=0.19.8
stamp=$venv/.frameworks
made=$(cat "$0" "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$made" ]; then exit 0; fi

pip() { "$venv/bin/python" -m pip "$@" --quiet -c "$root/constraints.txt"; }

wheel() { # wheel NAME: the path of a cached wheel for this python and this torch, if it is there
  find "$wheels" -name "$1-*.whl" | head -n 1
}

build_horovod() { # its sources ask for C++ 14 and 11, torch's headers for 17
  local work
  work=$(mktemp -d "$cache/build.XXXXXX")
  trap 'rm -rf "$work"' RETURN
  pip download --no-deps --no-binary :all: --no-build-isolation -d "$work" "horovod==$HOROVOD"
  tar -xzf "$work"/horovod-*.tar.gz -C "$work"
  cd "$work/horovod-$HOROVOD"
  sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' CMakeLists.txt horovod/torch/CMakeLists.txt
  sed -i 's/-std=c++11 -fPIC/-std=c++17 -fPIC/' third_party/gloo/CMakeLists.txt
  env HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITHOUT_MPI=1 MAKEFLAGS="-j$(nproc)" PATH="$venv/bin:$PATH" \
    "$venv/bin/python" -m pip wheel --quiet --no-build-isolation --no-deps -w "$work/made" . ||
    { echo "frameworks.sh: horovod $HOROVOD could not be built" >&2; exit 1; }
  mv "$work"/made/horovod-*.whl "$wheels/"
  cd "$root"
}

compile_for_deepspeed() { # what init_distributed() compiles on a machine without GPUs
  RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 PATH="$venv/bin:$PATH" \
    "$venv/bin/python" - >"$cache/deepspeed.log" 2>&1 <<'PYTHON' || { tail -n 20 "$cache/deepspeed.log" >&2; exit 1; }
import tempfile, torch, deepspeed
with tempfile.TemporaryDirectory() as folder:
    deepspeed.init_distributed(dist_backend="gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    torch.distributed.destroy_process_group()
PYTHON
}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip install torch numpy packaging wheel 'setuptools<81' cffi cloudpickle psutil pyyaml ninja
wheels=$cache/$("$venv/bin/python" -c 'import sys, torch; print(sys.implementation.cache_tag, torch.__version__, sep="-")')
mkdir -p "$wheels"
command -v cmake >/dev/null || pip install 'cmake<4'
[ -n "$(wheel horovod)" ] || build_horovod
[ -n "$(wheel deepspeed)" ] || pip wheel --no-build-isolation --no-deps -w "$wheels" "deepspeed==$DEEPSPEED"
pip install "$(wheel horovod)" "$(wheel deepspeed)" -e "$root[examples,master]"
ln -sfn "$TORCH_EXTENSIONS_DIR" "$venv/torch_extensions" # where the tests find it
compile_for_deepspeed
echo "$made" >"$stamp"
