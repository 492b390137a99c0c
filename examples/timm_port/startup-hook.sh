# Installs what the steps need beside torch, unless it is there. A trial's first start runs this, in an environment of its
# own on top of yours. For runs without a master, run it once by hand: bash startup-hook.sh
set -e
if python -c 'import sklearn, timm' 2>/dev/null; then
  :
elif python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
  # torch is named so that it stays as it is, and pip looks for the torchvision that was built for it.
  pip install --quiet timm scikit-learn "torch==$(python -c 'import torch; print(torch.__version__)')"
else
  # PyPI's torchvision is built for CUDA: a new one cannot be imported beside a torch without it. This one can, and does
  # without its compiled operators, which timm does not call.
  pip install --quiet --no-deps timm torchvision==0.16.2
  pip install --quiet huggingface_hub numpy pillow pyyaml requests safetensors scikit-learn
fi
set +e
