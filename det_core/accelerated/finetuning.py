"""Freeze parts of a model, and unfreeze them group by group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

BN_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Types of modules that a :class:`ModelFreezer` does not change by default."""


def _module_is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BN_MODULES)


@dataclass(frozen=True)
class LayerGroup:
    """A direct child of the model.

    Attributes:
        layer_group_idx: its index from the start, and from the end: ``(0, -3)`` is the first of three.
        module: the child.
        is_frozen: whether any of its parameters is frozen.
    """

    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


@dataclass(frozen=True)
class Layer:
    """A module without submodules.

    Attributes:
        layer_idx: its index from the start, and from the end, over the whole model.
        layer_group_idx: indexes of its group.
        module: the module.
        is_frozen: whether its parameters are frozen; without parameters, whether it is in evaluation mode.
    """

    layer_idx: tuple[int, int]
    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


class ModelFreezer:
    """Freezes and unfreezes the layer groups of a model: its direct children in order, or the model if it has none.

    The model's own parameters, such as a vision transformer's position embedding, belong to the first group. All
    parameters are trainable at first.

    Args:
        model: the model, without wrappers.
        freeze_batch_norms: treat batch norms like other modules. By default they are unchanged, and keep adapting to
            the data.
    """

    def __init__(self, model: nn.Module, freeze_batch_norms: bool = False) -> None:
        self.model = model
        self.freeze_batch_norms = freeze_batch_norms
        model.requires_grad_(True)

    def _groups(self) -> list[nn.Module]:
        return list(self.model.children()) or [self.model]

    def get_layer_groups(self) -> list[LayerGroup]:
        """Return the layer groups of the model."""
        groups = self._groups()
        return [
            LayerGroup((i, i - len(groups)), group, any(not p.requires_grad for p in self._parameters(i)))
            for i, group in enumerate(groups)
        ]

    def get_layers(self) -> list[Layer]:
        """Return the layers of the model in order.

        Raises:
            ValueError: If only some parameters of a layer are frozen.
        """
        groups = self._groups()
        found = [
            ((i, i - len(groups)), name, module)
            for i, group in enumerate(groups)
            for name, module in group.named_modules()
            if next(module.children(), None) is None
        ]
        return [
            Layer(
                (n, n - len(found)), group, module, _layer_is_frozen(module, f"{name or 'module'} of group {group[0]}")
            )
            for n, (group, name, module) in enumerate(found)
        ]

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are not frozen, for an optimizer."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze a range of layer groups; by default all but the last.

        Args:
            from_index: first group; negative indexes count from the end.
            to_index: last group, inclusive; the two may be swapped.
            set_modules_as_eval: also put their modules into evaluation mode, until ``model.train()`` is called.

        Raises:
            IndexError: If an index is out of range.
        """
        for i in self._range(from_index, to_index):
            for parameter in self._parameters(i):
                parameter.requires_grad_(False)
            if set_modules_as_eval:
                for module in self._modules(i):
                    module.training = False  # module.eval() would change batch norms in it

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, Any]]:
        """Unfreeze a range of layer groups; by default all.

        Args:
            from_index: first group; negative indexes count from the end.
            to_index: last group, inclusive; the two may be swapped.
            set_modules_as_training: also put their modules into training mode.

        Returns:
            for each group with frozen parameters, by its index from the start: ``{"params": [...]}`` with these
            parameters, for ``optimizer.add_param_group()``.

        Raises:
            IndexError: If an index is out of range.
        """
        thawed: dict[int, dict[str, Any]] = {}
        for i in self._range(from_index, to_index):
            frozen = [parameter for parameter in self._parameters(i) if not parameter.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            if frozen:
                thawed[i] = {"params": frozen}
            if set_modules_as_training:
                for module in self._modules(i):
                    module.training = True
        return thawed

    def _convert_idxs(self, from_index: int, to_index: int) -> tuple[int, int]:
        """Return both indexes counted from the start, the smaller one first."""
        size = len(self._groups())
        for name, index in (("from_index", from_index), ("to_index", to_index)):
            if not -size <= index < size:
                raise IndexError(f"{name}={index}: the model has {size} layer groups, from {-size} to {size - 1}")
        first, last = sorted((from_index % size, to_index % size))
        return first, last

    def _range(self, from_index: int, to_index: int) -> range:
        first, last = self._convert_idxs(from_index, to_index)
        return range(first, last + 1)

    def _modules(self, i: int) -> list[nn.Module]:
        """Return the modules of a group that may be changed."""
        return [m for m in self._groups()[i].modules() if self.freeze_batch_norms or not _module_is_batch_norm(m)]

    def _parameters(self, i: int) -> list[nn.Parameter]:
        """Return the parameters of a group that may be changed, each once."""
        modules = self._modules(i)
        if i == 0:
            modules = [self.model, *modules]  # for its own parameters
        return list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))


def _layer_is_frozen(module: nn.Module, name: str) -> bool:
    trainable = {parameter.requires_grad for parameter in module.parameters()}
    if len(trainable) == 2:
        raise ValueError(f"the layer {name} ({type(module).__name__}) has both frozen and trainable parameters")
    if not trainable:
        return not module.training
    return not trainable.pop()
