"""Optuna's samplers: the next trial's hyperparameters come from one of them, which learns from those before.

This is the one file of this room that uses a third-party package.

Each trial is asked for from a sampler that is made anew, with the trial's own seed: all that a sampler knows is then in
the trials of its study, which follow from the record. Some samplers (:data:`_STATEFUL_SAMPLERS`) keep notes beside the
trials; they are asked again when a search is recovered. What was decided then stands in any case.
"""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core._json import equal_json
from det_core._optional import require
from det_core.search._events import JSON, Action, Completed, Create, Event, Exited, Validated
from det_core.search._plain import RandomSearch
from det_core.search._search import WORST_SCORE, Trial
from det_core.search._space import Parameter

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
_STATEFUL_SAMPLERS = ("cmaes", "qmc", "nsgaii")
"""Samplers that write what they know beside the trials of the study."""
_REQUIRED_MODULES = {"cmaes": ["cmaes"], "gp": ["scipy", "torch"], "qmc": ["scipy"]}
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
        for module in _REQUIRED_MODULES.get(self._name, []):
            require(module, extra="torch" if module == "torch" else "optuna", purpose=purpose)
        self._varying = [parameter for parameter in self._space.parameters if parameter.kind != "const"]
        self._distributions = {parameter.name: self._distribution(parameter) for parameter in self._varying}
        self._asked: int | None = None
        """The trial of the study that the sampler proposed last, while it is no trial of the search yet."""
        self._numbers: dict[str, int] = {}
        """Request id -> number in the study, of trials that have not ended."""
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self._study = self._optuna.create_study(direction="minimize", sampler=self._sampler(0))

    def _propose(self, rng: random.Random, seed: int) -> JSON:
        self._study.sampler = self._sampler(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = self._study.ask(self._distributions)
        self._asked = asked.number
        return self._space.fill(lambda parameter: _value(parameter, asked.params))

    def _on_action(self, event: Event, action: Action, trial: Trial | None) -> None:
        super()._on_action(event, action, trial)
        if isinstance(action, Create):
            if self._asked is None:
                self._enter(action)
            assert self._asked is not None
            self._numbers[action.request_id], self._asked = self._asked, None

    def _enter(self, action: Create) -> None:
        """Bring a recorded trial into the study."""
        if self._name in _STATEFUL_SAMPLERS:
            # The trial's own seed stands in the record, so that also a search of an older version is asked the same.
            if self._propose(random.Random(), action.seed) == action.hparams:
                return
            logger.warning("the sampler %s proposes otherwise now than it did; what was recorded stands", self._name)
            self._study.tell(self._asked, state=self._optuna.trial.TrialState.FAIL)
        self._asked = len(self._study.get_trials(deepcopy=False))
        params = {parameter.name: _proposed(parameter, action.hparams) for parameter in self._varying}
        running, kept = self._optuna.trial.TrialState.RUNNING, self._distributions
        self._study.add_trial(self._optuna.trial.create_trial(state=running, params=params, distributions=kept))

    def _on_trial_event(self, event: Completed | Validated | Exited, trial: Trial, target_length: int | None) -> None:
        super()._on_trial_event(event, trial, target_length)
        number = self._numbers.pop(trial.request_id, None)
        if number is None:
            return
        score = self._score(event.metric) if isinstance(event, Completed) else WORST_SCORE
        if abs(score) == WORST_SCORE:
            self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(number, score)

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


def _value(parameter: Parameter, params: Mapping[str, Any]) -> Any:
    """A trial's value, from what the sampler proposed, which for a list of values is a place in it."""
    if parameter.kind == "const":
        return parameter.spec["val"]
    proposed = params[parameter.name]
    return parameter.spec["vals"][proposed] if parameter.kind == "categorical" else proposed


def _proposed(parameter: Parameter, hparams: JSON) -> Any:
    """What the sampler had proposed, from a trial's hyperparameters."""
    value: Any = hparams
    for name in parameter.path:
        value = value[name]
    if parameter.kind == "categorical":
        return next(place for place, one in enumerate(parameter.spec["vals"]) if equal_json(one, value))
    return value
