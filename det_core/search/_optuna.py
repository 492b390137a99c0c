"""Search by Optuna's samplers, which propose hyperparameters from the metrics of earlier trials.

Only this module of the room uses a third-party package.

Each trial is proposed by a new sampler with the trial's own seed, so that a sampler's whole state is in the trials of
its study, which follow from the record. Some samplers (:data:`_STATEFUL_SAMPLERS`) keep more than that; a recovered
search has them propose again. Recorded decisions stand in any case.
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
"""Samplers that keep state beside the trials of the study."""
_REQUIRED_MODULES = {"cmaes": ["cmaes"], "gp": ["scipy", "torch"], "qmc": ["scipy"]}
"""Modules that samplers import at their first proposal."""


class OptunaSearch(RandomSearch):
    """Random search with hyperparameters that a sampler proposes."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._name = str(searcher.get("sampler", "tpe"))
        if self._name not in _SAMPLERS:
            raise ValueError(f"searcher.sampler={self._name!r}: expected one of {', '.join(sorted(_SAMPLERS))}")
        self._options = dict(searcher.get("sampler_options") or {})
        purpose = f"the sampler {self._name!r} of Optuna"
        self._optuna = require("optuna", extra="optuna", purpose=purpose)
        for module in _REQUIRED_MODULES.get(self._name, []):
            extra = "torch" if module == "torch" else "optuna"
            require(module, extra=extra, purpose=purpose)
        self._varying = [parameter for parameter in self._space.parameters if parameter.kind != "const"]
        self._distributions = {parameter.name: self._distribution(parameter) for parameter in self._varying}
        self._asked: int | None = None
        """Number in the study of the last proposal, until the search has a trial of it."""
        self._numbers: dict[str, int] = {}
        """Request ID -> number in the study, of trials that have not ended."""
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self._study = self._optuna.create_study(direction="minimize", sampler=self._sampler(0))

    def _propose(self, rng: random.Random, seed: int) -> JSON:
        self._study.sampler = self._sampler(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns of its experimental samplers at each proposal
            proposal = self._study.ask(self._distributions)
        self._asked = proposal.number
        return self._space.fill(lambda parameter: _value(parameter, proposal.params))

    def _on_action(self, event: Event, action: Action, trial: Trial | None) -> None:
        super()._on_action(event, action, trial)
        if isinstance(action, Create):
            if self._asked is None:
                self._enter(action)
            assert self._asked is not None
            self._numbers[action.request_id] = self._asked
            self._asked = None

    def _enter(self, action: Create) -> None:
        """Add a recorded trial to the study."""
        if self._name in _STATEFUL_SAMPLERS:
            # By the recorded seed: an older version may have drawn another one for this trial.
            if self._propose(random.Random(), action.seed) == action.hparams:
                return
            logger.warning("sampler %s proposed differently on replay; keeping the recorded decisions", self._name)
            self._study.tell(self._asked, state=self._optuna.trial.TrialState.FAIL)
        self._asked = len(self._study.get_trials(deepcopy=False))
        params = {parameter.name: _proposed(parameter, action.hparams) for parameter in self._varying}
        running = self._optuna.trial.TrialState.RUNNING
        trial = self._optuna.trial.create_trial(state=running, params=params, distributions=self._distributions)
        self._study.add_trial(trial)

    def _on_trial_event(self, event: Completed | Validated | Exited, trial: Trial, target_length: int | None) -> None:
        super()._on_trial_event(event, trial, target_length)
        number = self._numbers.pop(trial.request_id, None)
        if number is None:
            return
        score = WORST_SCORE
        if isinstance(event, Completed):
            score = self._score(event.metric)
        # Samplers fit models to the values, which one huge value would spoil.
        if abs(score) == WORST_SCORE:
            self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(number, score)

    def _sampler(self, seed: int) -> BaseSampler:
        options = {"seed": seed, **self._options}
        if self._name == "tpe":
            # Otherwise trials that run at the same time get nearly the same proposals.
            options.setdefault("constant_liar", True)
        if self._name == "qmc":
            # Scrambling goes by the seed, and each trial has another one: the points would follow no sequence.
            options.setdefault("scramble", False)
        if self._name in ("cmaes", "qmc"):
            options.setdefault("warn_independent_sampling", False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns of its experimental samplers
            try:
                sampler: BaseSampler = getattr(self._optuna.samplers, _SAMPLERS[self._name])(**options)
            except TypeError as e:
                raise ValueError(f"searcher.sampler_options: {e}") from e
        return sampler

    def _distribution(self, parameter: Parameter) -> Any:
        kinds = self._optuna.distributions
        spec = parameter.spec
        if parameter.kind == "categorical":
            return kinds.CategoricalDistribution(range(len(spec["vals"])))
        if parameter.kind == "int":
            return kinds.IntDistribution(spec["minval"], spec["maxval"])
        if parameter.kind == "log":
            # Of the value and not of its exponent, which a recorded value would not give back to the last bit.
            ends = sorted(math.pow(spec["base"], spec[end]) for end in ("minval", "maxval"))
            return kinds.FloatDistribution(*ends, log=True)
        return kinds.FloatDistribution(float(spec["minval"]), float(spec["maxval"]))


def _value(parameter: Parameter, params: Mapping[str, Any]) -> Any:
    """Return a trial's value from the sampler's proposal, which of a categorical parameter is an index."""
    if parameter.kind == "const":
        return parameter.spec["val"]
    if parameter.kind == "categorical":
        return parameter.spec["vals"][params[parameter.name]]
    return params[parameter.name]


def _proposed(parameter: Parameter, hparams: JSON) -> Any:
    """Return the sampler's proposal that led to a trial's hyperparameters."""
    value: Any = hparams
    for name in parameter.path:
        value = value[name]
    if parameter.kind == "categorical":
        return next(place for place, one in enumerate(parameter.spec["vals"]) if equal_json(one, value))
    return value
