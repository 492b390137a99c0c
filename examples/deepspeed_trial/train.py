"""Train the trial from a script of one's own: alone, or behind a launcher; stop it, and start it again to go on."""

from model_def import DigitsTrial

from det_core import pytorch
from det_core.pytorch import deepspeed

HPARAMS = {"width": 16, "dropout": 0.2}

if __name__ == "__main__":
    with deepspeed.init(hparams=HPARAMS, searcher_metric="accuracy", smaller_is_better=False) as context:
        deepspeed.Trainer(DigitsTrial(context), context).fit(
            max_length=pytorch.Epoch(10), validation_period=pytorch.Epoch(1), reporting_period=pytorch.Batch(20)
        )
