"""A metric, a schedule and an early stop of one's own.

    python examples/hooks.py [--section.key VALUE …]

Trains the `grammar` preset (no download, at most a minute) into runs/grammar.
"""

import sys

import pentameter as pm


class WeightNorm:
    """A metric: the Euclidean norm of all weights."""

    def on_step(self, trainer, step):
        """Write it into metrics.jsonl every 50 steps."""
        if step.step % 50 == 0:
            squares = sum(p.detach().square().sum() for p in trainer.engine.parameters())
            trainer.record("weight_norm", step=step.step, value=squares.sqrt().item())


class StopBelow:
    """An early stop: the run ends, as if it were complete, at a validation loss."""

    def __init__(self, loss):
        self.loss = loss

    def on_eval(self, trainer, evaluation):
        """Stop once it is reached; the trainer saves what there is."""
        if evaluation.split == "val" and evaluation.loss < self.loss:
            trainer.stop(f"validation loss {evaluation.loss:.3f} is below {self.loss}")


def inverse_square_root(step):
    """The rate of a step (0-based): a warm-up to 3e-3 in 25 steps, then down with their root."""
    return 3e-3 * min((step + 1) / 25, (25 / (step + 1)) ** 0.5)


config = pm.load_config("grammar", sys.argv[1:])
hooks = [WeightNorm(), StopBelow(2.1)]
end = pm.Trainer(config, hooks=hooks, schedule=inverse_square_root).fit()
print(f"ended after step {end.step}: {end.reason}")
