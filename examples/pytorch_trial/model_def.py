"""The same classifier as a trial: what a batch does is ours to say, the loop is the Trainer's."""

import torch
from torch.nn.functional import cross_entropy
from train_plain import build_model, datasets

from det_core import pytorch


class DigitsTrial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.train_set, self.valid_set = datasets()
        torch.manual_seed(1)
        model = build_model(context.get_hparam("width"), context.get_hparam("dropout"))
        self.model = context.wrap_model(model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=context.get_hparam("lr"))
        self.optimizer = context.wrap_optimizer(optimizer)

    def build_training_data_loader(self):
        batch_size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.train_set, batch_size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.valid_set, 60)  # six whole batches: the mean over them is that over the images

    def train_batch(self, batch, epoch_idx, batch_idx):
        images, digits = batch
        loss = cross_entropy(self.model(images), digits)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        images, digits = batch
        return {"accuracy": (self.model(images).argmax(1) == digits).float().mean()}
