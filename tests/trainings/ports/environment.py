"""Learn the best arm of a bandit whose arms drift: a loop over an environment, without torch."""

import json
import random

from det_core import core

LENGTH = 24


class Bandit:
    """Three arms, whose rewards change with every pull."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.means = [0.1, 0.5, 0.9]

    def pull(self, arm):
        """Return the reward of an arm."""
        self.means = [mean + self.random.gauss(0, 0.05) for mean in self.means]
        return self.means[arm] + self.random.gauss(0, 0.1)

    def state(self):
        """Return all that the next pull depends on."""
        return {"means": self.means, "random": self.random.getstate()}

    def restore(self, state):
        """Put the bandit back to where it was."""
        self.means = state["means"]
        self.random.setstate(as_random_state(state["random"]))


def as_random_state(words):
    """Return the state of a generator that JSON has made a list of."""
    version, numbers, gauss = words
    return version, tuple(numbers), gauss


random.seed(4)
bandit = Bandit(seed=5)
step = 0
values = [0.0, 0.0, 0.0]
with core.init(name="bandit") as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = json.loads((path / "agent.json").read_text())
            step = saved["step"]
            values = saved["values"]
            bandit.restore(saved["bandit"])
            random.setstate(as_random_state(saved["random"]))
    while step < LENGTH:
        arm = random.randrange(3) if random.random() < 0.2 else values.index(max(values))
        reward = bandit.pull(arm)
        values[arm] += 0.1 * (reward - values[arm])
        step += 1
        ctx.train.report_training_metrics(step, {"reward": reward, "value": max(values)})
        stop = ctx.preempt.should_preempt()
        if stop or step % 5 == 0 or step == LENGTH:
            saved = {"step": step, "values": values, "bandit": bandit.state(), "random": random.getstate()}
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "agent.json").write_text(json.dumps(saved))
        if stop:
            break
