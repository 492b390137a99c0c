"""Train with Hugging Face accelerate: it keeps weights, optimizer and random states; the script keeps the position."""

import torch
from accelerate import Accelerator

from det_core import core

EPOCHS = 3
BATCH = 16

if __name__ == "__main__":
    distributed = core.DistributedContext.detect()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(8)
    data = torch.randn(128, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    per_epoch = len(data) // BATCH
    with core.init(distributed=distributed, name="accelerate", resume="latest") as ctx:
        with ctx.checkpoint.resume() as path:
            if path is not None:
                accelerator.load_state(str(path))
        for step in range(ctx.steps_completed, EPOCHS * per_epoch):
            epoch, batch = divmod(step, per_epoch)
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
            rows = order[batch * BATCH : (batch + 1) * BATCH][distributed.rank :: distributed.size]
            loss = torch.nn.functional.mse_loss(model(data[rows]), data[rows])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            step += 1
            if accelerator.is_main_process:
                ctx.train.report_training_metrics(step, {"loss": loss.item()})
            stop = ctx.preempt.should_preempt()
            if stop or step % 5 == 0 or step == EPOCHS * per_epoch:
                with ctx.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
                    accelerator.save_state(str(path))
            if stop:
                break
    accelerator.end_training()
