"""Freezing and unfreezing layer groups."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from det_core.accelerated.finetuning import BN_MODULES, ModelFreezer, _module_is_batch_norm  # noqa: E402


class Attention(nn.Module):  # type: ignore[misc]
    """Has a parameter of its own beside a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(2, 2)


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(2))
        self.stem = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
        self.body = Attention()
        self.head = nn.Linear(2, 1)


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def evaluating(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if not module.training}


STEM, BODY = {"position", "stem.0.weight", "stem.0.bias"}, {"body.scale", "body.out.weight", "body.out.bias"}
NORM = {"stem.1.weight", "stem.1.bias"}


def test_case_35_frozen_and_in_evaluation_mode() -> None:
    model = Model()
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    assert frozen(model) == STEM | BODY, "all groups but the last, also parameters outside of layers"
    assert evaluating(model) == {"stem", "stem.0", "stem.2", "body", "body.out"}
    assert model.stem[1].training and not frozen(model) & NORM, "batch norms are left alone"


def test_case_35_unfrozen_with_the_modes_left() -> None:
    model = Model()
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    before = evaluating(model)
    freezer.unfreeze(set_modules_as_training=False)
    assert frozen(model) == set() and evaluating(model) == before
    freezer.unfreeze()
    assert evaluating(model) == set()


def test_freezing_leaves_the_modes_unless_asked() -> None:
    model = Model()
    ModelFreezer(model).freeze()
    assert frozen(model) == STEM | BODY and evaluating(model) == set()


def test_case_35_batch_norms_if_asked() -> None:
    model = Model()
    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze(0, 0, set_modules_as_eval=True)
    assert frozen(model) == STEM | NORM and evaluating(model) == {"stem", "stem.0", "stem.1", "stem.2"}
    assert set(freezer.unfreeze()) == {0}


def test_case_35_what_is_returned_fits_the_optimizer() -> None:
    model = Model()
    freezer = ModelFreezer(model)
    freezer.freeze()
    optimizer = torch.optim.SGD(freezer.get_trainable_parameters(), lr=0.1)
    groups = freezer.unfreeze(from_index=-2)
    assert list(groups) == [0, 1]
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in model.body.parameters()}
    for group in groups.values():
        optimizer.add_param_group({**group, "lr": 0.01})
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    assert freezer.unfreeze() == {}, "nothing is newly unfrozen"


def test_all_is_trainable_at_first() -> None:
    model = Model().requires_grad_(False)
    freezer = ModelFreezer(model)
    assert frozen(model) == set()
    assert len(freezer.get_trainable_parameters()) == len(list(model.parameters()))


def test_indexes() -> None:
    model = Model()
    freezer = ModelFreezer(model)
    assert freezer._convert_idxs(0, -2) == (0, 1)
    assert freezer._convert_idxs(-1, 0) == (0, 2)
    assert freezer._convert_idxs(-1, -1) == freezer._convert_idxs(2, 2) == (2, 2)
    for wrong in ((3, 0), (0, 3), (-4, 0), (0, -4)):
        with pytest.raises(IndexError, match="3 layer groups, from -3 to 2"):
            freezer._convert_idxs(*wrong)
        with pytest.raises(IndexError):
            freezer.freeze(*wrong)
        with pytest.raises(IndexError):
            freezer.unfreeze(*wrong)
    assert frozen(model) == set()
    freezer.freeze(1, 0)
    assert frozen(model) == STEM | BODY


def test_groups_and_layers() -> None:
    model = Model()
    freezer = ModelFreezer(model)
    freezer.freeze(1, 1)
    groups = freezer.get_layer_groups()
    assert [(g.layer_group_idx, g.is_frozen) for g in groups] == [((0, -3), False), ((1, -2), True), ((2, -1), False)]
    assert [g.module for g in groups] == [model.stem, model.body, model.head]
    layers = freezer.get_layers()
    assert [layer.module for layer in layers] == [*model.stem, model.body.out, model.head]
    assert [layer.layer_idx for layer in layers] == [(0, -5), (1, -4), (2, -3), (3, -2), (4, -1)]
    assert [layer.layer_group_idx[0] for layer in layers] == [0, 0, 0, 1, 2]
    assert [layer.is_frozen for layer in layers] == [False, False, False, True, False]
    model.stem[2].eval()
    assert freezer.get_layers()[2].is_frozen, "a layer without parameters, by its mode"
    model.head.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"of group 2 \(Linear\) has both frozen and trainable"):
        freezer.get_layers()


def test_a_model_without_children_is_its_only_group() -> None:
    model = nn.Linear(2, 2)
    freezer = ModelFreezer(model)
    assert [g.layer_group_idx for g in freezer.get_layer_groups()] == [(0, -1)]
    freezer.freeze(0, 0)
    assert frozen(model) == {"weight", "bias"}
    assert len(freezer.unfreeze()[0]["params"]) == 2


@pytest.mark.parametrize("kind", BN_MODULES)
def test_batch_norms(kind: Any) -> None:
    assert _module_is_batch_norm(kind(2)) and not _module_is_batch_norm(nn.LayerNorm(2))
