"""How models are spread over processes: one class a way."""

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
    """Models that this process has alone; the base of ways to spread them over processes, in which every rank makes the
    same calls in the same order.

    Args:
        device: where models and batches of this rank go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and spread it; what is to be called in its place."""
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model as the user has built it."""
        return model

    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Compute gradients, as ``loss.backward()``; averaged over ranks outside of :meth:`no_sync`."""
        if gradient is None and not retain_graph and not create_graph:
            loss.backward()
        else:
            loss.backward(gradient, retain_graph, create_graph)

    def step(self, optimizer: Optimizer, scaler: Any = None) -> bool:
        """Step an optimizer, by a GradScaler if there is one; False: that skipped it, as gradients were not finite."""
        if scaler is None:
            optimizer.step()
            return True
        scaler.step(optimizer)
        # update() has not run yet: what the scaler has found is kept for each optimizer until then
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] if scaler.is_enabled() else {}
        return not any(bool(inf.item()) for inf in found.values())

    def no_sync(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """While it lasts, gradients stay this rank's own."""
        return nullcontext()

    def evaluating(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """While it lasts, ranks may call the models different numbers of times."""
        return nullcontext()

    def check_averaged(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Before a first update: see that it is the same on every rank."""

    def state(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The states of models and optimizers in lists, under ``models_state_dict`` and ``optimizers_state_dict``."""
        return {
            "models_state_dict": [self.unwrap(model).state_dict() for model in models],
            "optimizers_state_dict": [optimizer.state_dict() for optimizer in optimizers],
        }

    def load(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Put models and optimizers to what :meth:`state` returned, here or under another way to spread them; models'
        keys may begin with ``module.``, as those of a DistributedDataParallel do.

        Raises:
            RuntimeError: the state is that of another model; the message has torch's list of differences.
            ValueError: it is that of another optimizer.
        """
        for model, saved in zip(models, state["models_state_dict"], strict=True):
            load_model(self.unwrap(model), saved)
        for optimizer, saved in zip(optimizers, state["optimizers_state_dict"], strict=True):
            load_optimizer(optimizer, saved)


class DDP(OneProcess):
    """Models that every rank has whole, with gradients averaged over the ranks (torch's DistributedDataParallel)."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """A model without a parameter that trains only becomes rank 0's, as there is nothing to average."""
        model = model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            for tensor in (*model.parameters(), *model.buffers()):
                torch.distributed.broadcast(tensor.detach(), 0)
            return model
        return _Parallel(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """What is inside."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner: nn.Module = model.module
            return inner
        return model

    def no_sync(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Of those that are spread."""
        stack = ExitStack()
        for model in _spread(models):
            stack.enter_context(model.no_sync())
        return stack

    @contextmanager
    def evaluating(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """DDP may broadcast buffers (a BatchNorm's, say) in a forward pass, in which a rank without a batch would be
        missed; here they are broadcast before."""
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
        """See that every rank has the same gradients and weights, by their sums and norms.

        Raises:
            RuntimeError: they differ, on every rank: without this the ranks would train apart without a word.
        """
        parameters = parameters_of(optimizers)
        if not parameters:
            return
        mine = torch.stack([_figures(p) for p in parameters])
        everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, mine)
        alike = torch.stack([torch.isclose(one, everyone[0], equal_nan=True) for one in everyone]).all(2).all(0)
        if alike.all():
            return
        names = {id(p): name for model in models for name, p in self.unwrap(model).named_parameters()}
        apart = [p for p, same in zip(parameters, alike.tolist(), strict=True) if not same]
        told = [names.get(id(p), f"one of shape {list(p.shape)} that is in no model") for p in apart[:3]]
        raise RuntimeError(
            f"ranks would train apart: before the first update {len(apart)} of {len(parameters)} parameters or their "
            f"gradients differ between ranks ({', '.join(told)}{', …' if apart[3:] else ''}). Gradients are averaged "
            "where the model itself is called, model(…): not where a part of it is, model.part(…), nor those of a "
            "module outside of it; let its forward() choose the part, by an argument"
        )


def _figures(parameter: nn.Parameter) -> Tensor:
    """The sums of a parameter and of its gradient, and the gradient's norm."""
    gradient = parameter.new_zeros(1) if parameter.grad is None else parameter.grad
    slopes = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.stack([x.real.double() for x in (parameter.detach().sum(), slopes.sum(), slopes.norm())])


class _Parallel(nn.parallel.DistributedDataParallel):
    """Gives attributes and items of the user's model as if it were that."""

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """The parameters that optimizers update."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a model's state, whose keys may all begin with ``module.``."""
    if saved and all(key.startswith(PREFIX) for key in saved) and "module" not in dict(model.named_children()):
        saved = {key.removeprefix(PREFIX): value for key, value in saved.items()}
    model.load_state_dict(saved)


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's state.

    Raises:
        ValueError: it is that of another kind of optimizer, or of other parameters.
    """
    before = [group.keys() & optimizer.defaults.keys() for group in optimizer.param_groups]
    kind = f"the state is not that of {type(optimizer).__name__}: it has no"
    try:
        optimizer.load_state_dict(saved)
    except KeyError as e:
        raise ValueError(f"{kind} {e.args[0]}") from None
    for had, group in zip(before, optimizer.param_groups, strict=True):
        if lacking := sorted(had - group.keys()):  # torch has filled in what its older versions did not save
            raise ValueError(f"{kind} {', '.join(lacking)}")


@contextmanager
def fitting(checkpoint: Any) -> Iterator[None]:
    """While states of a checkpoint are loaded: says which, if they are of other models or optimizers.

    Raises:
        CheckpointError: they are; the message ends with torch's.
    """
    try:
        yield
    except (RuntimeError, ValueError) as e:
        raise CheckpointError(f"{checkpoint} does not fit this training's models and optimizers: {e}") from None


def _spread(models: Sequence[nn.Module]) -> list[nn.parallel.DistributedDataParallel]:
    return [model for model in models if isinstance(model, nn.parallel.DistributedDataParallel)]
