"""Train the trial from a script of one's own: alone, or behind the launcher; stop it, and start it again to go on."""

from model_def import DigitsTrial

from det_core import pytorch

HPARAMS = {"lr": 2e-3, "width": 16, "dropout": 0.2, "global_batch_size": 32}

if __name__ == "__main__":
    with pytorch.init(hparams=HPARAMS, searcher_metric="accuracy", smaller_is_better=False) as context:
        pytorch.Trainer(DigitsTrial(context), context).fit(
            max_length=pytorch.Epoch(10), validation_period=pytorch.Epoch(1), reporting_period=pytorch.Batch(20)
        )
