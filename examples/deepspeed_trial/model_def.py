"""A classifier of handwritten digits as a DeepSpeedTrial: ZeRO 1, with gradients accumulated over micro batches."""

import deepspeed as ds
import torch
from digits import datasets, layers
from torch.nn.functional import cross_entropy

from det_core import pytorch
from det_core.pytorch import deepspeed


class DigitsTrial(deepspeed.DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.train_set, self.valid_set = datasets()
        torch.manual_seed(1)
        model = torch.nn.Sequential(*layers(context.get_hparam("width"), context.get_hparam("dropout")))
        overwrite = context.get_hparams().get("deepspeed", {})  # what a search changes of DeepSpeed's configuration
        config = deepspeed.overwrite_deepspeed_config("ds_config.json", overwrite)
        engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        micro_batch = self.context.get_train_micro_batch_size_per_gpu()
        return pytorch.DataLoader(self.train_set, micro_batch, shuffle=True, drop_last=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.valid_set, 60)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        images, digits = self.context.to_device(next(dataloader_iter))
        loss = cross_entropy(self.engine(images), digits)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter):
        images, digits = self.context.to_device(next(dataloader_iter))
        return {"accuracy": (self.engine(images).argmax(1) == digits).float().mean()}
