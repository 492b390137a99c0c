"""Optuna's samplers: the next trial's hyperparameters come from one of them, which learns from those before.

This is the one file of this room that uses a third-party package.

Each trial is asked for from a sampler that is made anew, with the trial's own seed: all that a sampler knows is then in
the trials of its study, so that it can be recovered. Of the samplers that keep notes there (:data:`_NOTES`) the notes
are part of the snapshot, and asking is repeated after a recovery; what was decided then stands in any case.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core._optional import require
from det_core.search._actions import Create
from det_core.search._events import Completed, Exited, Validated
from det_core.search._plain import RandomSearch
from det_core.search._space import Parameter
from det_core.search._trial import WORST, Trial

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

logger = logging.getLogger("det_core.search")
_SAMPLERS = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "random": "RandomSampler",
    "qmc": "QMCSampler",
    "nsgaii": "NSGAIISampler",
}
_NOTES = ("cmaes", "qmc", "nsgaii")
"""Samplers that write what they know beside the trials of the study."""
_NEEDS = {"cmaes": ["cmaes"], "gp": ["scipy", "torch"], "qmc": ["scipy"]}
"""What they import when they are first asked."""


class OptunaSearch(RandomSearch):
    """As ``random``, with hyperparameters that a sampler proposes."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._name = str(searcher.get("sampler", "tpe"))
        if self._name not in _SAMPLERS:
            raise ValueError(f"searcher.sampler is {self._name!r}; there are {', '.join(sorted(_SAMPLERS))}")
        self._options = dict(searcher.get("sampler_options") or {})
        purpose = f"the sampler {self._name!r} of Optuna"
        self._optuna = require("optuna", extra="optuna", purpose=purpose)
        for module in _NEEDS.get(self._name, []):
            require(module, extra="torch" if module == "torch" else "optuna", purpose=purpose)
        self._varying = [p for p in self._space.parameters if p.kind != "const"]
        self._constant = {p.name: p.spec["val"] for p in self._space.parameters if p.kind == "const"}
        self._distributions = {p.name: self._distribution(p) for p in self._varying}
        self._numbers: dict[str, int] = {}
        """Request id -> number of the trial in the study."""
        self._study = self._fresh_study()

    def _new(self) -> Create:
        request_id = self._new_id()
        seed = self._random.getrandbits(32) & 0x7FFFFFFF
        self._study.sampler = self._sampler(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = self._study.ask(self._distributions)
        self._numbers[request_id] = asked.number
        return Create(request_id, self._hparams(asked.params), seed)

    def _redraw(self, action: Create) -> None:
        if self._name in _NOTES and self._new() == action:
            return
        number = self._numbers.pop(action.request_id, None)
        if number is not None:
            self._tell(number, None)
            logger.warning("the sampler %s proposes otherwise now than it did; what was recorded stands", self._name)
        elif self._name not in _NOTES:
            self._new_id()
            self._random.getrandbits(32)
        self._numbers[action.request_id] = len(self._study.get_trials(deepcopy=False))
        running = self._optuna.trial.TrialState.RUNNING
        self._add({"state": running.name, "params": self._proposed(action), "value": None, "notes": {}})

    def _absorb(self, event: Completed | Validated | Exited, trial: Trial, told: int | None) -> None:
        super()._absorb(event, trial, told)
        if isinstance(event, Completed):
            score = self._score(event.metric)
            self._finish(trial.request_id, None if abs(score) == WORST else score)
        elif isinstance(event, Exited):
            self._finish(trial.request_id, None)

    def _finish(self, request_id: str, value: float | None) -> None:
        number = self._numbers.pop(request_id, None)
        if number is not None:
            self._tell(number, value)

    def _tell(self, number: int, value: float | None) -> None:
        """End a trial of the study; None: without a value."""
        if value is None:
            self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(number, value)

    def _method_state(self) -> Any:
        trials = self._study.get_trials(deepcopy=False)
        return {
            "numbers": dict(self._numbers),
            "trials": [
                {"state": t.state.name, "params": t.params, "value": t.value, "notes": t.system_attrs} for t in trials
            ],
            "notes": self._storage.get_study_system_attrs(self._study_id),
        }

    def _load_method(self, state: Any) -> None:
        self._study = self._fresh_study()
        for key, value in state["notes"].items():
            self._storage.set_study_system_attr(self._study_id, key, value)
        for trial in state["trials"]:
            self._add(trial)
        self._numbers = dict(state["numbers"])

    def _add(self, trial: Mapping[str, Any]) -> None:
        """Enter a trial that the study does not have yet."""
        state = self._optuna.trial.TrialState[trial["state"]]
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state,
                value=trial["value"],
                params=trial["params"],
                distributions=self._distributions,
                system_attrs=trial["notes"],
            )
        )

    def _fresh_study(self) -> Any:
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self._storage = self._optuna.storages.InMemoryStorage()
        study = self._optuna.create_study(
            study_name="search", storage=self._storage, direction="minimize", sampler=self._sampler(0)
        )
        self._study_id = self._storage.get_study_id_from_name("search")
        return study

    def _sampler(self, seed: int) -> BaseSampler:
        options = {"seed": seed, **self._options}
        if self._name == "tpe":
            options.setdefault("constant_liar", True)  # trials that run are not proposed again
        if self._name == "qmc":
            options.setdefault("scramble", False)  # it would be by the seed, which is another one for each trial
        if self._name in ("cmaes", "qmc"):
            options.setdefault("warn_independent_sampling", False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Optuna's about what it calls experimental
            try:
                made: BaseSampler = getattr(self._optuna.samplers, _SAMPLERS[self._name])(**options)
            except TypeError as e:
                raise ValueError(f"searcher.sampler_options: {e}") from e
        return made

    def _distribution(self, parameter: Parameter) -> Any:
        kinds, spec = self._optuna.distributions, parameter.spec
        if parameter.kind == "categorical":
            return kinds.CategoricalDistribution(range(len(spec["vals"])))
        if parameter.kind == "int":
            return kinds.IntDistribution(spec["minval"], spec["maxval"])
        if parameter.kind == "log":  # of the value, not of its exponent, which could not be got back to the last bit
            ends = sorted(math.pow(spec["base"], spec[end]) for end in ("minval", "maxval"))
            return kinds.FloatDistribution(*ends, log=True)
        return kinds.FloatDistribution(float(spec["minval"]), float(spec["maxval"]))

    def _hparams(self, proposed: Mapping[str, Any]) -> dict[str, Any]:
        """A trial's hyperparameters from what the sampler proposed, which for lists are places."""
        values = dict(self._constant)
        for parameter in self._varying:
            value, spec = proposed[parameter.name], parameter.spec
            if parameter.kind == "categorical":
                value = spec["vals"][value]
            values[parameter.name] = value
        return self._space.filled(values)

    def _proposed(self, action: Create) -> dict[str, Any]:
        """What the sampler had proposed, from a trial's hyperparameters."""
        proposed = {}
        for parameter in self._varying:
            value: Any = action.hparams
            for name in parameter.path:
                value = value[name]
            if parameter.kind == "categorical":
                value = parameter.spec["vals"].index(value)
            proposed[parameter.name] = value
        return proposed
