"""This process's rank of a trainer, asked as the mesh is: for what needs no actors."""

import torch.distributed as dist

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.sections.schema import AlgorithmConfig
from titan_rl.controller.offline.steps import DataSteps
from titan_rl.controller.preflight.checks import Checked, check
from titan_rl.trainer.step.evaluation import evaluate
from titan_rl.trainer.step.learner import Learner


class LocalTrainer:
    def __init__(self, checked: Checked, path):
        self.learner = Learner(checked.config, checked.titan, path)
        self.group = checked.titan.batch_rank(dist.get_rank())
        """Whose rows this rank takes."""

    async def train(self, batches, step):
        return self.learner.train_step([b.rows[self.group] for b in batches], [b.has_signal for b in batches])

    async def evaluate(self, batch, name=""):
        algorithm = self.learner.algorithm
        if name:
            algorithm = make_algorithm(AlgorithmConfig(name=name), [], on_data=True)
        return evaluate(self.learner, batch.rows[self.group], algorithm)

    async def sft(self, batches):
        return self.learner.sft([rows[self.group] for rows in batches], self.learner.config.sft.lr)


def make_steps(config, is_left_out=lambda row, step: False) -> tuple[Checked, DataSteps]:
    checked = check(config)
    parts = checked.config, checked.algorithm, checked.titan.layout, checked.dataset
    return checked, DataSteps(*parts, is_left_out=is_left_out)
