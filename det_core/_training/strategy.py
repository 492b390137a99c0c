"""Strategies for models on one process or several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_core.errors import CheckpointError

PREFIX = "module."


class OneProcess:
    """Strategy for models on one process, and base class of distributed ones.

    Every rank makes the same calls in the same order.

    Args:
        device: device of models and batches of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and distribute it; return the model to call instead."""
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model."""
        return model

    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Compute gradients as ``loss.backward()`` does; outside of :meth:`no_sync`, average them over ranks."""
        if gradient is None and not retain_graph and not create_graph:
            loss.backward()
        else:
            loss.backward(gradient, retain_graph, create_graph)

    def step(self, optimizer: Optimizer, scaler: Any = None) -> bool:
        """Step an optimizer; return False if the scaler skipped it because of gradients that are not finite."""
        if scaler is None:
            optimizer.step()
            return True
        scaler.step(optimizer)
        if not scaler.is_enabled():
            return True
        # The scaler keeps this for each optimizer until its update().
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return not any(bool(inf.item()) for inf in found.values())

    def no_sync(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context manager in which gradients are not averaged over ranks."""
        return nullcontext()

    def evaluating(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context manager in which ranks may call the models different numbers of times."""
        return nullcontext()

    def check_averaged(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Raise an error if the first update would differ between ranks."""

    def state(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return the states of models and optimizers, in ``models_state_dict`` and ``optimizers_state_dict``."""
        return {
            "models_state_dict": [self.unwrap(model).state_dict() for model in models],
            "optimizers_state_dict": [optimizer.state_dict() for optimizer in optimizers],
        }

    def load(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Restore states that :meth:`state` of any strategy returned.

        Keys of models may begin with ``module.``, as those of a DistributedDataParallel do.

        Raises:
            RuntimeError: If the state is that of another model, with torch's list of differences.
            ValueError: If the state is that of another optimizer.
        """
        for model, saved in zip(models, state["models_state_dict"], strict=True):
            load_model(self.unwrap(model), saved)
        for optimizer, saved in zip(optimizers, state["optimizers_state_dict"], strict=True):
            load_optimizer(optimizer, saved)


class DDP(OneProcess):
    """Strategy with a replica of each model on every rank: torch's DistributedDataParallel."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and replicate the chief's."""
        model = model.to(self.device)
        # DistributedDataParallel rejects a model without trainable parameters.
        if not any(parameter.requires_grad for parameter in model.parameters()):
            for tensor in (*model.parameters(), *model.buffers()):
                torch.distributed.broadcast(tensor.detach(), 0)
            return model
        return _Parallel(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner: nn.Module = model.module
            return inner
        return model

    def no_sync(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context manager in which gradients are not averaged over ranks."""
        stack = ExitStack()
        for model in _spread(models):
            stack.enter_context(model.no_sync())
        return stack

    @contextmanager
    def evaluating(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Broadcast buffers now, and not in forward passes."""
        # DDP broadcasts buffers, such as a BatchNorm's, in each forward pass: a rank without a batch would be missing.
        before = [(model, model.require_forward_param_sync) for model in _spread(models) if model.broadcast_buffers]
        for model, _ in before:
            for buffer in model.module.buffers():
                torch.distributed.broadcast(buffer, 0)
            model.require_forward_param_sync = False
        try:
            yield
        finally:
            for model, required in before:
                model.require_forward_param_sync = required

    def check_averaged(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Compare gradients and weights of all ranks by their sums and norms.

        Raises:
            RuntimeError: On every rank, if they differ.
        """
        parameters = parameters_of(optimizers)
        if not parameters:
            return
        own = torch.stack([_figures(p) for p in parameters])
        per_rank = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(per_rank, own)
        # Close and not equal: the order of a sum may differ between devices.
        equal = torch.stack([torch.isclose(one, per_rank[0], equal_nan=True) for one in per_rank]).all(2).all(0)
        if equal.all():
            return
        names = {id(p): name for model in models for name, p in self.unwrap(model).named_parameters()}
        different = [p for p, same in zip(parameters, equal.tolist(), strict=True) if not same]
        examples = [names.get(id(p), f"one of shape {list(p.shape)} outside of all models") for p in different[:3]]
        if different[3:]:
            examples.append("…")
        raise RuntimeError(
            f"ranks would train apart: before the first update, {len(different)} of {len(parameters)} parameters or "
            f"gradients differ between ranks ({', '.join(examples)}). Gradients are averaged if the model itself is "
            "called, model(…), but not if a part of it is called, model.part(…), nor in a module outside of it: select "
            "the part in forward(), by an argument"
        )


def _figures(parameter: nn.Parameter) -> Tensor:
    """Return the sums of a parameter and of its gradient, and the norm of the gradient."""
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.new_zeros(1)
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return torch.stack([x.real.double() for x in (parameter.detach().sum(), gradient.sum(), gradient.norm())])


class _Parallel(nn.parallel.DistributedDataParallel):
    """A DistributedDataParallel with the attributes and items of the user's model."""

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters that optimizers update."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the state of a model, whose keys may all begin with ``module.``."""
    if saved and all(key.startswith(PREFIX) for key in saved) and "module" not in dict(model.named_children()):
        saved = {key.removeprefix(PREFIX): value for key, value in saved.items()}
    model.load_state_dict(saved)


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the state of an optimizer.

    Raises:
        ValueError: If it is the state of another kind of optimizer, or of other parameters.
    """
    before = [group.keys() & optimizer.defaults.keys() for group in optimizer.param_groups]
    problem = f"the state is not that of {type(optimizer).__name__}: it lacks"
    try:
        optimizer.load_state_dict(saved)
    except KeyError as e:
        raise ValueError(f"{problem} {e.args[0]}") from None
    for had, group in zip(before, optimizer.param_groups, strict=True):
        # torch fills in options that its older versions did not save, but not all that another optimizer lacks.
        if missing := sorted(had - group.keys()):
            raise ValueError(f"{problem} {', '.join(missing)}")


@contextmanager
def fitting(checkpoint: Any) -> Iterator[None]:
    """Name the checkpoint in errors while its states are loaded.

    Raises:
        CheckpointError: If they are states of other models or optimizers, with torch's message.
    """
    try:
        yield
    except (RuntimeError, ValueError) as e:
        raise CheckpointError(f"{checkpoint} does not match the models and optimizers of this training: {e}") from None


def _spread(models: Sequence[nn.Module]) -> list[nn.parallel.DistributedDataParallel]:
    return [model for model in models if isinstance(model, nn.parallel.DistributedDataParallel)]
