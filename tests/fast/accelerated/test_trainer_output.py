"""Output of trainings, results of a script of the original's kind, and imports."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from det_core._training.progress_line import ProgressLine  # noqa: E402
from det_core.accelerated import Trainer, TrainerPlaceholderValues  # noqa: E402
from det_core.accelerated.callbacks import LogMetricsCallback, ProgressBarCallback, TrainerCallback  # noqa: E402
from det_core.accelerated.utils import epoch_seed  # noqa: E402
from support import warm  # noqa: E402
from support.trainings import a_trainer, evaluate, linear, rows, same, train  # noqa: E402

HEAVY = (
    "det_core.core", "det_core.journal", "accelerate", "tqdm", "tensorboard", "torch.utils.tensorboard", "torchmetrics",
    "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "sympy", "fsspec",
    "requests", "zmq", "pydantic", "pandas", "sqlite3", "rich", "IPython",
)  # fmt: skip


def defaults(**options: Any) -> Trainer:
    """Return a Trainer with the default callbacks."""
    model = linear()
    return Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_case_44_the_printed_lines(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = defaults()
    train(trainer, 2, eval_dataset=rows(20))
    values = trainer.run_history.get_metric_values
    epochs = "".join(
        f"\nStarting epoch {n}\n\ntrain_loss_epoch: {loss}\n\nStarting eval epoch\n\neval_loss_epoch: {evaluated}\n"
        for n, loss, evaluated in zip((1, 2), values("train_loss_epoch"), values("eval_loss_epoch"), strict=True)
    )
    assert capsys.readouterr().out == f"\nStarting training run\n{epochs}Finishing training run\n"
    evaluate(trainer)
    loss = trainer.run_history.get_latest_metric("evaluation_loss")
    assert capsys.readouterr().out == (
        f"\nStarting evaluation run\n\nStarting eval epoch\n\nevaluation_loss: {loss}\nFinishing evaluation run\n"
    )


def test_case_44_one_line_for_an_epoch_in_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train(defaults(), 2, eval_dataset=rows(20))
    printed = capsys.readouterr()
    lines = [line.split("  ") for line in printed.err.splitlines()]
    assert [line[0] for line in lines] == ["training: 4/4 batches", "evaluation: 2/2 batches"] * 2
    assert all(len(line) == 2 and line[1].endswith(" batches/s") for line in lines)
    values = trainer.run_history.get_metric_values
    losses = [*values("train_loss_epoch"), *values("eval_loss_epoch")]
    assert [printed.out.count(str(loss)) for loss in losses] == [1] * 4, "each once"


class Breaks(TrainerCallback):
    """Fails in an epoch's third batch."""

    def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        if step == 2:
            raise OSError("disk full")


def on_a_terminal(work: Any) -> str:
    """Return the output of ``work()`` with a terminal as stderr."""
    ours, theirs = pty.openpty()
    found: list[bytes] = []

    def read() -> None:
        while True:
            try:
                if not (data := os.read(ours, 4096)):
                    return
            except OSError:  # the terminal is gone
                return
            found.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    before = sys.stderr
    try:
        with os.fdopen(theirs, "w") as sys.stderr:
            work()
    finally:
        sys.stderr = before
        thread.join()
        os.close(ours)
    return b"".join(found).decode()


def test_case_44_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core._training.progress_line.DRAW_INTERVAL", 0.0)
    trainer = a_trainer(callbacks=[ProgressBarCallback])
    drawn = on_a_terminal(lambda: train(trainer, 2, eval_dataset=rows(20)))
    assert "\n" not in drawn and drawn.endswith("\r\x1b[K")
    shown = [text for text in drawn.split("\r\x1b[K") if text]
    assert [text.split()[0] for text in shown] == [*(f"{n}/4" for n in (1, 2, 3, 4)), "1/2", "2/2"] * 2
    assert all("loss" in text for text in shown if "/4" in text)


def test_case_44_the_line_is_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core._training.progress_line.DRAW_INTERVAL", 0.0)
    trainer = a_trainer(callbacks=[ProgressBarCallback, Breaks])

    def work() -> None:
        with pytest.raises(OSError, match="disk full"):
            train(trainer)

    drawn = on_a_terminal(work)
    assert "3/4" in drawn and drawn.endswith("\r\x1b[K")


def test_case_44_one_line_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's streams are not terminals, and only know the carriage return."""
    monkeypatch.setattr("det_core._training.progress_line.DRAW_INTERVAL", 0.0)
    OutStream = type("OutStream", (StringIO,), {"__module__": "ipykernel.iostream"})
    stream = OutStream()
    line = ProgressLine(stream)
    assert line.shown
    line.update(1, 4, {"loss": 0.123456})
    line.update(2, 4)
    line.close()
    text = stream.getvalue()
    assert "\x1b" not in text and "\n" not in text
    drawn, cells = text.split("\r"), [" "] * 80
    assert "1/4  loss 0.1235" in drawn and any(part.startswith("2/4") for part in drawn)
    for part in drawn:  # as a notebook does it: over what is there
        cells[: len(part)] = part
    assert "".join(cells).strip() == ""
    assert not ProgressLine(StringIO()).shown


def test_print_without_a_reader_fails_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    read, to = os.pipe()
    os.close(read)
    with open(to, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        trainer = defaults()
        train(trainer, 2)
        assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 2
        monkeypatch.undo()
    with pytest.raises(TypeError):
        trainer.print("text", unknown=1)


def test_log_metrics_is_overridden_by_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[dict[str, Any]] = []

    class Logger(LogMetricsCallback):
        def log_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
            logged.append(metrics)

    train(a_trainer(callbacks=[Logger]), 1, eval_dataset=rows(10))
    assert [list(metrics) for metrics in logged] == [["train_loss_epoch"], ["eval_loss_epoch"]]
    assert capsys.readouterr().out == ""


# a script of the original's kind

SCRIPT = """
from functools import partial
import json, sys, torch
from torch import nn, optim
from torch.utils.data import Dataset, random_split
from det_core.accelerated import Trainer, TrainerPlaceholderValues

class Digits(Dataset):
    "Images of 28 x 28 with one bright row each, which is their class."
    def __init__(self, size=40):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 10, (size,), generator=generator)
        self.images = 0.1 * torch.rand(size, 1, 28, 28, generator=generator)
        self.images[torch.arange(size), 0, 2 * self.labels] += 1
    def __len__(self): return len(self.labels)
    def __getitem__(self, i): return self.images[i], int(self.labels[i])

class MNISTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    def forward(self, x):
        return self.main(x)

def main():
    torch.manual_seed(1)
    dataset = Digits()
    train_dataset, validation_dataset, test_dataset = random_split(dataset, [24, 8, 8])
    model = MNISTModel()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_func = nn.CrossEntropyLoss()
    trainer = Trainer(model, loss_func=loss_func, optimizer=optimizer)
    trainer.train(
        train_dataset=train_dataset, eval_dataset=validation_dataset, num_epochs=2, per_device_batch_size=8,
        create_scheduler_fn=partial(
            optim.lr_scheduler.StepLR, step_size=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH * 1, gamma=0.1
        ),
    )
    trainer.evaluate(dataset=test_dataset, per_device_batch_size=8)
    torch.save(model.state_dict(), sys.argv[1])

if __name__ == "__main__":
    main()
"""


def test_a_script_of_the_originals_kind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import warnings; warnings.simplefilter('error')\n" + SCRIPT)
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        words = [script, tmp_path / "model.pt"]
        started = warm.start(words, cwd=tmp_path, stdout=stdout.fileno(), stderr=stderr.fileno())
    assert started.wait() == 0, err.read_text()
    lines = [line.split(":")[0] for line in out.read_text().splitlines() if line]
    epoch = ["train_loss_epoch", "Starting eval epoch", "eval_loss_epoch"]
    assert lines == [
        "Starting training run", *[text for n in (1, 2) for text in (f"Starting epoch {n}", *epoch)],
        "Finishing training run", "Starting evaluation run", "Starting eval epoch", "evaluation_loss",
        "Finishing evaluation run",
    ]  # fmt: skip
    space: dict[str, Any] = {"__name__": "plain"}
    exec(compile(SCRIPT, "script", "exec"), space)
    torch.manual_seed(1)
    data = space["random_split"](space["Digits"](), [24, 8, 8])[0]
    plain = by_a_plain_loop(space["MNISTModel"](), data)
    trained = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(trained[name], value) for name, value in plain.state_dict().items())


def by_a_plain_loop(model: Any, data: Any) -> Any:
    """Train the loop that the script stands for, in the order of seed 42."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
    generator = torch.Generator()
    sampler = torch.utils.data.RandomSampler(data, generator=generator)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        generator.manual_seed(epoch_seed(42, epoch))
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def test_the_seeds_of_epochs_stay_what_they_are() -> None:
    """Else a training would go on in another order after an update of det_core."""
    assert [epoch_seed(42, epoch) for epoch in (0, 1)] == [6839728766377637706, 1474913046063446145]


def test_the_weights_of_a_plain_loop_without_shuffling() -> None:
    plain, data = linear(), rows()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=10):
            nn.functional.mse_loss(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(train(a_trainer(), 2, data, train_dataloader_kwargs={"shuffle": False}), plain)


# defects 1 and 2


@pytest.mark.parametrize(("options", "seed"), [({"seed": None}, 5), ({"seed": 7}, 7), ({}, 42)])
def test_what_a_training_makes_of_the_generators(options: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(3)
    trainer = a_trainer(**options)
    torch.manual_seed(5)
    train(trainer)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("seeds", "equal"), [((1, 1), True), ((1, 2), False)])
def test_the_seed_orders_the_data(seeds: tuple[int, int], equal: bool) -> None:
    first, second = (train(a_trainer(seed=seed), 1) for seed in seeds)
    assert same(first, second) is equal


def test_without_a_seed_the_users_generator_orders_the_data() -> None:
    runs = []
    for seed in (8, 8, 9):
        trainer = a_trainer(seed=None)
        torch.manual_seed(seed)
        runs.append(train(trainer))
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2])


# what is imported

ALONE = """
import json, numpy, random, sys, torch

def drawn():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

for seed in (random.seed, numpy.random.seed, torch.manual_seed):
    seed(9)
before, state = set(sys.modules), drawn()
import det_core.accelerated
from det_core.accelerated import _placeholders, finetuning, run_config, schedulers, tracking, utils
imported = sorted(set(sys.modules) - before)
assert drawn() == state, "importing seeds nothing"
from torch.utils.data import TensorDataset

def train():
    model = torch.nn.Linear(2, 1)
    trainer = det_core.accelerated.Trainer(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.ones(40, 2), torch.ones(40, 1))
    trainer.train(data, 2, data, per_device_batch_size=10, train_dataloader_kwargs={"num_workers": 0},
                  eval_dataloader_kwargs={"num_workers": 0})
    trainer.evaluate(data, dataloader_kwargs={"num_workers": 0})
    trainer.save_checkpoint(sys.argv[1])
    trainer.load_checkpoint(sys.argv[1])

assert "accelerate" not in sys.modules
train()
print(json.dumps([imported, sorted(sys.modules)]))
"""


def test_case_40_what_an_import_and_a_training_without_the_core_load(tmp_path: Path) -> None:
    """A cold start: nothing heavy by an import, which seeds nothing; nothing of the core by a training."""
    done = subprocess.run([sys.executable, "-c", ALONE, tmp_path / "c.pt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported, accelerated = json.loads(done.stdout.splitlines()[-1])
    assert "det_core.accelerated.trainer" in imported
    assert [name for name in imported if any(name == h or name.startswith(f"{h}.") for h in HEAVY)] == []
    assert [
        name for name in imported if name.startswith(("det_core.pytorch", "det_core.core", "torch.", "numpy"))
    ] == []
    core = ("det_core.core", "det_core.ipc", "det_core.journal", "det_core.backend")
    assert [name for name in accelerated if name.startswith(core)] == []


def test_a_placeholder_is_of_the_root_module() -> None:
    assert TrainerPlaceholderValues.NUM_EPOCHS in list(TrainerPlaceholderValues)
