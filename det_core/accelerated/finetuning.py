"""Freezing parts of a model, and giving them back to the optimizer group by group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

BN_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The kinds of module that a :class:`ModelFreezer` leaves alone unless told otherwise."""


def _module_is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BN_MODULES)


@dataclass(frozen=True)
class LayerGroup:
    """A direct child of the model.

    Attributes:
        layer_group_idx: its index from the start, and from the end: ``(0, -3)`` is the first of three.
        module: the child.
        is_frozen: whether any of its parameters is.
    """

    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


@dataclass(frozen=True)
class Layer:
    """A module without modules in it.

    Attributes:
        layer_idx: its index from the start, and from the end, over the whole model.
        layer_group_idx: the indexes of the group that it is in.
        module: the module.
        is_frozen: whether its parameters are; of a layer without any, whether it is in evaluation mode.
    """

    layer_idx: tuple[int, int]
    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


class ModelFreezer:
    """Freezes and unfreezes the layer groups of a model: its direct children, in order; without any, itself.

    Parameters of the model's own, such as a vision transformer's position embedding, count as the first group's.
    At first all parameters are made trainable.

    Args:
        model: the model, without wrappers.
        freeze_batch_norms: treat batch norms as other modules; else their parameters and modes are left alone, so that
            they go on adapting to the data.
    """

    def __init__(self, model: nn.Module, freeze_batch_norms: bool = False) -> None:
        self.model = model
        self.freeze_batch_norms = freeze_batch_norms
        model.requires_grad_(True)

    def _groups(self) -> list[nn.Module]:
        return list(self.model.children()) or [self.model]

    def get_layer_groups(self) -> list[LayerGroup]:
        """The model's layer groups."""
        groups = self._groups()
        return [
            LayerGroup((i, i - len(groups)), group, any(not p.requires_grad for p in self._parameters(i)))
            for i, group in enumerate(groups)
        ]

    def get_layers(self) -> list[Layer]:
        """The model's layers, in order.

        Raises:
            ValueError: some parameters of a layer are frozen and some are not.
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
        """The parameters that are not frozen: what to make an optimizer of."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze a range of layer groups; by default all but the last.

        Args:
            from_index: the first group; below 0 counted from the end.
            to_index: the last, which is frozen too; the two may change places.
            set_modules_as_eval: also put their modules into evaluation mode, until ``model.train()`` is called.

        Raises:
            IndexError: there is no such group.
        """
        for i in self._range(from_index, to_index):
            for parameter in self._parameters(i):
                parameter.requires_grad_(False)
            for module in self._modules(i) if set_modules_as_eval else ():
                module.training = False  # module.eval() would reach the batch norms in it

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, Any]]:
        """Unfreeze a range of layer groups; by default all.

        Args:
            from_index: the first group; below 0 counted from the end.
            to_index: the last, which is unfrozen too; the two may change places.
            set_modules_as_training: also put their modules into training mode.

        Returns:
            For each group, by its index from the start, in which something was frozen: ``{"params": [...]}`` with what
            was, ready for ``optimizer.add_param_group()``.

        Raises:
            IndexError: there is no such group.
        """
        thawed: dict[int, dict[str, Any]] = {}
        for i in self._range(from_index, to_index):
            frozen = [parameter for parameter in self._parameters(i) if not parameter.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            if frozen:
                thawed[i] = {"params": frozen}
            for module in self._modules(i) if set_modules_as_training else ():
                module.training = True
        return thawed

    def _convert_idxs(self, from_index: int, to_index: int) -> tuple[int, int]:
        """Both indexes counted from the start, the smaller one first."""
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
        """The modules of a group that may be changed."""
        return [m for m in self._groups()[i].modules() if self.freeze_batch_norms or not _module_is_batch_norm(m)]

    def _parameters(self, i: int) -> list[nn.Parameter]:
        """The parameters of a group that may be changed, each once, also those that are not in a layer."""
        own = list(self.model.parameters(recurse=False)) if i == 0 else []
        found = own + [parameter for module in self._modules(i) for parameter in module.parameters(recurse=False)]
        return list(dict.fromkeys(found))


def _layer_is_frozen(module: nn.Module, name: str) -> bool:
    trainable = {parameter.requires_grad for parameter in module.parameters()}
    if len(trainable) == 2:
        raise ValueError(f"the layer {name} ({type(module).__name__}) has frozen parameters and others that are not")
    return not trainable.pop() if trainable else not module.training
