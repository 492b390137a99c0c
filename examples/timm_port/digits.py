"""Handwritten digits as folders of images, laid out as timm and torchvision read them.

They are the 1,797 that ship inside scikit-learn, enlarged from 8 by 8 pixels: 1,437 of them in ``train/0`` to
``train/9`` and 360 in ``validation/0`` to ``validation/9``.
"""

import os
import shutil
import tempfile
from pathlib import Path

SIZE = 32


def image_folder():
    """Return the folder, which is written by the first who asks for it: under another name, so that others wait for
    nothing and find either all images or none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "timm_port" / f"digits-{SIZE}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix="digits-", dir=folder.parent))
        try:
            write_images(aside)
            aside.rename(folder)
        except OSError:
            if not folder.exists():  # and nobody else was faster
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def write_images(folder):
    """Write all images into ``train`` and ``validation`` in ``folder``, the same ones each time."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images * 255 / 16).astype(np.uint8).reshape(-1, 8, 8)
    for place, number in enumerate(np.random.RandomState(0).permutation(len(images))):
        of_digit = folder / ("validation" if place < 360 else "train") / str(labels[number])
        of_digit.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(of_digit / f"{number}.png")


if __name__ == "__main__":
    print(image_folder())
