"""The sections ``resources`` and ``environment``: where, and in what surroundings, trials run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import RootModel

from det_core.config._rules import (
    AnyList,
    AnyObject,
    Anything,
    Count,
    Flag,
    Rule,
    Text,
    Variable,
    demand,
    integer,
    number,
)
from det_core.config._section import Cross, Kinds, Section, option

DEVICES = ("cpu", "cuda", "rocm")


def _image(given: Any) -> Any:
    if isinstance(given, Mapping):
        demand(all(k in (*DEVICES, "gpu") and isinstance(v, str) for k, v in given.items()))
        return dict(given)
    demand(isinstance(given, str))
    return given


def _memory(given: Any) -> Any:
    demand(isinstance(given, str) or (type(given) is int and given >= 0))
    return given


class Resources(Section):
    """What each trial gets, and what all of them may have."""

    slots_per_trial: Count = option(1, "how many slots (GPUs, or places where there are none) each trial gets")
    max_slots: Count | None = option(None, "how many slots all trials of the experiment may have at once; null: all")
    priority: Annotated[int, integer(1, 99)] | None = option(
        None, "1 comes first, 99 last; null: the master's default. Lower ones are preempted for higher ones"
    )
    weight: Annotated[float, number(above=0)] = option(1, "for schedulers that share fairly", unused=True)
    resource_pool: Text = option("", "which machines", unused=True)
    shm_size: Annotated[Any, Rule('a number of bytes, or a text as "4g"', _memory)] | None = option(
        None, "how much shared memory a container gets", unused=True
    )
    is_single_node: Flag | None = option(None, "whether a trial must be on one machine", unused=True)
    native_parallel: Flag = option(False, "whether each process is a container of its own", unused=True)
    devices: AnyList = option([], "devices for containers", unused=True)

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        slots, most = given.get("slots_per_trial", 1), given.get("max_slots")
        if type(slots) is int and type(most) is int and slots > most:
            yield Cross(("max_slots",), f"at least slots_per_trial, which is {slots}, or no trial could ever start")


class PerDevice(Section):
    """Variables for each kind of device."""

    cpu: list[Variable] = option([], "for trials without a GPU")
    cuda: list[Variable] = option([], "for trials on NVIDIA's GPUs")
    rocm: list[Variable] = option([], "for trials on AMD's GPUs")
    gpu: list[Variable] = option([], "former name of `cuda`")


class ForAll(RootModel[list[Variable]]):
    """Variables that are the same for all devices."""


def _spread(made: PerDevice | ForAll) -> dict[str, list[str]]:
    if isinstance(made, ForAll):
        return {device: list(made.root) for device in DEVICES}
    return {"cpu": made.cpu, "cuda": [*made.gpu, *made.cuda], "rocm": made.rocm}


_VARIABLES = Kinds(
    lambda: {"each": PerDevice, "": ForAll},
    lambda given: "each" if isinstance(given, Mapping) else "",
    after=_spread,
)


class Environment(Section):
    """In what surroundings trials run."""

    environment_variables: Annotated[Any, _VARIABLES] = option(
        {device: [] for device in DEVICES},
        "environment variables: a list of `NAME=VALUE`, or such a list for each of cpu, cuda and rocm",
    )
    image: Annotated[Any, Rule("the name of an image, or one for each of cpu, cuda and rocm", _image)] | None = option(
        None, "the container's image", unused=True
    )
    ports: Anything = option(None, "the container's ports", unused=True)
    proxy_ports: AnyList = option([], "ports that the master forwards", unused=True)
    force_pull_image: Flag = option(False, "whether to fetch the image each time", unused=True)
    registry_auth: AnyObject | None = option(None, "how to log in where the image is", unused=True, secret=True)
    add_capabilities: list[Text] = option([], "of the container", unused=True)
    drop_capabilities: list[Text] = option([], "of the container", unused=True)
    pod_spec: AnyObject | None = option(None, "for Kubernetes", unused=True)
