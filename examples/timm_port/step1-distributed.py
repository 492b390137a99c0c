"""Train an image model of timm's: on handwritten digits, or on any folder or dataset that timm can read."""

import argparse
import logging
import multiprocessing
import os
import time
from collections import OrderedDict

import digits
import torch
from timm import utils
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import create_model, load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn.parallel import DistributedDataParallel

_logger = logging.getLogger("train")


def _parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_argument_group("images")
    group.add_argument("--data-dir", metavar="DIR", help="where the images are (default: digits, made by digits.py)")
    group.add_argument("--dataset", default="", help="what is in DIR, as torch/cifar10 (default: a folder of images)")
    group.add_argument("--dataset-download", action="store_true", help="fetch the dataset if it is not there")
    group.add_argument("--train-split", default="train")
    group.add_argument("--val-split", default="validation")
    group.add_argument("--num-classes", type=int, default=10)
    group.add_argument("--input-size", type=int, nargs=3, default=(3, 32, 32), metavar=("C", "H", "W"))
    group.add_argument("--mean", type=float, nargs="+", default=(0.5,), help="of the images' values")
    group.add_argument("--std", type=float, nargs="+", default=(0.5,))
    group.add_argument("--batch-size", type=int, default=32, help="images of a step in each process")
    group.add_argument("--workers", type=int, default=0, help="processes beside each that load images")
    group = parser.add_argument_group("augmentation")
    group.add_argument("--scale", type=float, nargs=2, default=(0.8, 1.0), help="part of an image that is looked at")
    group.add_argument("--ratio", type=float, nargs=2, default=(0.9, 1.1), help="its width to its height")
    group.add_argument("--hflip", type=float, default=0.0, help="how many images are flipped")
    group.add_argument("--aa", default="rand-m3-n1-mstd0.5-inc1", help="an AutoAugment or RandAugment policy, or none")
    group.add_argument("--reprob", type=float, default=0.1, help="how many images have a part erased")
    group = parser.add_argument_group("training")
    group.add_argument("--model", default="test_resnet")
    group.add_argument("--epochs", type=int, default=5)
    group.add_argument("--opt", default="sgd")
    group.add_argument("--lr", type=float, default=0.05)
    group.add_argument("--weight-decay", type=float, default=2e-5)
    group.add_argument("--sched", choices=["cosine", "poly", "tanh"], default="cosine")
    group.add_argument("--warmup-epochs", type=int, default=1)
    group.add_argument("--warmup-lr", type=float, default=1e-2)
    group.add_argument("--min-lr", type=float, default=1e-3)
    group.add_argument("--smoothing", type=float, default=0.1, help="of labels")
    group.add_argument("--ema-decay", type=float, default=0.95, help="of the averaged weights, which are validated")
    group.add_argument("--seed", type=int, default=42)
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--output", default="output", metavar="DIR", help="where they go")
    group.add_argument("--checkpoint-hist", type=int, default=3, help="how many stay")
    group.add_argument("--eval-metric", choices=["loss", "top1", "top5"], default="loss", help="which of them is best")
    group.add_argument("--resume", metavar="FILE", help="a checkpoint to go on from")
    args = parser.parse_args()
    if args.dataset and not args.data_dir:
        parser.error("--dataset needs --data-dir, the folder where it is")
    return args


def main(args):
    utils.setup_default_logging()
    _logger.info(f"Arguments: {vars(args)}")
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    args.rank = int(os.environ.get("RANK", 0))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.distributed = args.world_size > 1
    device = torch.device("cpu")
    device_ids = None
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", args.local_rank)
        device_ids = [device]
        torch.cuda.set_device(device)
        backend = "nccl"
    torch.set_num_threads(1)  # images this small gain nothing from more
    if args.distributed:
        torch.distributed.init_process_group(backend=backend, init_method="env://")
        _logger.info(
            "Training in distributed mode with multiple processes, 1 device per process. "
            f"Process {args.rank}, total {args.world_size}, device {device}."
        )
    else:
        _logger.info(f"Training with a single process on device {device}.")

    utils.random_seed(args.seed)
    model = create_model(args.model, num_classes=args.num_classes, in_chans=args.input_size[0]).to(device)
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay)
    lr_scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=args.sched,
        num_epochs=args.epochs,
        min_lr=args.min_lr,
        warmup_epochs=args.warmup_epochs,
        warmup_lr=args.warmup_lr,
    )
    model_ema = utils.ModelEmaV2(model, decay=args.ema_decay)  # before DDP, which would rename the weights

    start_epoch = 0
    best_metric = None
    checkpoint_path = args.resume
    if checkpoint_path:
        start_epoch = resume_checkpoint(model, checkpoint_path, optimizer)
        load_checkpoint(model_ema.module, checkpoint_path, use_ema=True)

    if args.distributed:
        model = DistributedDataParallel(model, device_ids=device_ids)
    utils.random_seed(args.seed, args.rank)
    loader_train, loader_eval = create_loaders(args, device)
    train_loss_fn = LabelSmoothingCrossEntropy(args.smoothing)
    validate_loss_fn = torch.nn.CrossEntropyLoss()

    saver = None
    if args.rank == 0:
        saver = utils.CheckpointSaver(
            model=model,
            optimizer=optimizer,
            args=args,
            model_ema=model_ema,
            checkpoint_dir=utils.get_outdir(args.output, time.strftime("%Y%m%d-%H%M%S"), inc=True),
            decreasing=args.eval_metric == "loss",
            max_history=args.checkpoint_hist,
        )

    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            loader_train.sampler.set_epoch(epoch)
        lr_scheduler.step(epoch)
        train_metrics = train_one_epoch(model, loader_train, optimizer, train_loss_fn, args, device, model_ema)
        if args.distributed:
            for each in (model, model_ema.module):
                utils.distribute_bn(each, args.world_size, reduce=True)  # each rank has seen other images
        eval_metrics = validate(model_ema.module, loader_eval, validate_loss_fn, args, device)
        if args.rank == 0:
            _logger.info(f"Epoch {epoch}: {as_text(train_metrics)}; validation: {as_text(eval_metrics)}")
            best_metric, _ = saver.save_checkpoint(epoch, metric=eval_metrics[args.eval_metric])

    if best_metric is not None:
        _logger.info(f"Best {args.eval_metric}: {best_metric:.4g}")


def create_loaders(args, device):
    """Return what loads the images to train on, augmented, and those to validate on."""
    data_config = resolve_data_config(vars(args))
    root = args.data_dir or digits.image_folder()
    if args.workers:
        # Forked beside the threads of torch.distributed, a process may hang before it begins (python/cpython#112275).
        multiprocessing.set_start_method("forkserver", force=True)
        multiprocessing.set_forkserver_preload(["timm"])
    common = {
        "input_size": data_config["input_size"],
        "interpolation": data_config["interpolation"],
        "mean": data_config["mean"],
        "std": data_config["std"],
        "batch_size": args.batch_size,
        "num_workers": args.workers,
        "distributed": args.distributed,
        "use_prefetcher": device.type == "cuda",  # it copies in a stream of CUDA's
        "device": device,
        "persistent_workers": False,  # new workers in each epoch take its seed
    }
    image_mode = "RGB"
    if args.input_size[0] == 1:
        image_mode = "L"
    loaders = []
    for split, is_training in ((args.train_split, True), (args.val_split, False)):
        dataset = create_dataset(
            args.dataset,
            root=root,
            split=split,
            is_training=is_training,
            download=args.dataset_download,
            input_img_mode=image_mode,
        )
        options = {"crop_pct": 1.0}
        if is_training:
            options = {
                "is_training": True,
                "scale": args.scale,
                "ratio": args.ratio,
                "hflip": args.hflip,
                "color_jitter": None,
                "auto_augment": None if args.aa == "none" else args.aa,
                "re_prob": args.reprob,
                "re_mode": "pixel",
            }
        loaders.append(create_loader(dataset, **common, **options))
    return loaders


def train_one_epoch(model, loader, optimizer, loss_fn, args, device, model_ema):
    """Train on each image once; return what a step of all processes took, lost and did, on average."""
    model.train()
    total = torch.zeros((), device=device)
    count = 0
    began = time.perf_counter()
    for input, target in loader:
        input = input.to(device)
        target = target.to(device)
        loss = loss_fn(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update(model)
        total += loss.detach() * len(input)  # no item(), which would wait for the device at each step
        count += len(input)
    loss = averaged(total / count, args).item()
    rate = count * args.world_size / (time.perf_counter() - began)
    return OrderedDict(loss=loss, lr=optimizer.param_groups[0]["lr"], images_per_second=rate)


@torch.no_grad()
def validate(model, loader, loss_fn, args, device):
    """Return how well the model does on the validation images, over all processes."""
    model.eval()
    meters = OrderedDict((name, utils.AverageMeter()) for name in ("loss", "top1", "top5"))
    for input, target in loader:
        input = input.to(device)
        target = target.to(device)
        output = model(input)
        values = (loss_fn(output, target), *utils.accuracy(output, target, topk=(1, 5)))
        for meter, value in zip(meters.values(), values, strict=True):
            meter.update(value, len(input))
    return OrderedDict((name, averaged(meter.avg, args).item()) for name, meter in meters.items())


def averaged(value, args):
    """Return the mean of a tensor over all processes."""
    if args.distributed:
        value = utils.reduce_tensor(value, args.world_size)
    return value


def as_text(metrics):
    """Metrics for a line of the log."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


if __name__ == "__main__":
    main(_parse_args())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
