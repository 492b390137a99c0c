"""Load a trained trial from a checkpoint's folder, and see how many digits it reads: ``python predict.py FOLDER``."""

import sys

import torch

from det_core import pytorch

trial = pytorch.load_trial_from_checkpoint_path(sys.argv[1])
images, digits = trial.valid_set.tensors
trial.model.eval()
with torch.no_grad():
    right = trial.model(images).argmax(1) == digits
print(f"{right.sum()} of {len(right)} digits read: accuracy {right.float().mean():.4f}")
