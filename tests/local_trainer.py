"""A trainer of one rank in this process, asked as the mesh is: for what needs no actors."""

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.schema import AlgorithmConfig
from titan_rl.controller.data_steps import DataSteps
from titan_rl.controller.preflight import Checked, check
from titan_rl.trainer.evaluation import evaluate
from titan_rl.trainer.learner import Learner


class LocalTrainer:
    def __init__(self, checked: Checked, path):
        self.learner = Learner(checked.config, checked.titan, path)

    async def train(self, batches, step):
        return self.learner.train_step([batch.rows[0] for batch in batches], [b.has_signal for b in batches])

    async def evaluate(self, batch, name=""):
        algorithm = self.learner.algorithm
        if name:
            algorithm = make_algorithm(AlgorithmConfig(name=name), [], on_data=True)
        return evaluate(self.learner, batch.rows[0], algorithm)

    async def sft(self, batches):
        return self.learner.sft([rows[0] for rows in batches], self.learner.config.sft.lr)


def make_steps(config) -> tuple[Checked, DataSteps]:
    checked = check(config)
    return checked, DataSteps(checked.config, checked.algorithm, checked.titan.layout, checked.dataset)
