"""The same classifier as a pipeline: each rank has a half of the layers."""

import deepspeed as ds
import torch
from deepspeed.pipe import PipelineModule
from digits import datasets, layers

from det_core import pytorch
from det_core.pytorch import deepspeed


class DigitsPipeline(deepspeed.DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.train_set, self.valid_set = datasets()
        torch.manual_seed(1)
        model = PipelineModule(
            layers=layers(context.get_hparam("width"), context.get_hparam("dropout")),
            loss_fn=torch.nn.functional.cross_entropy,
            num_stages=2,
        )
        config = deepspeed.overwrite_deepspeed_config("ds_config.json", context.get_hparams().get("deepspeed", {}))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = ds.initialize(model=model, model_parameters=parameters, config=config)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        micro_batch = self.context.get_train_micro_batch_size_per_gpu()
        return pytorch.DataLoader(self.train_set, micro_batch, shuffle=True, drop_last=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.valid_set, 45)  # eight batches, which the pipeline takes four at a time

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.engine.train_batch(data_iter=dataloader_iter)}

    def evaluate_batch(self, dataloader_iter):
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}
