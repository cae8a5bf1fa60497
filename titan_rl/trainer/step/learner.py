"""Training steps of a policy rank on its sharded model (sharded_model.py).

    train_step: roles ─▶ advantages ─▶ for each update: forward_backward ─▶ the learned role's update ─▶ optimizer_step

``forward_backward`` and ``optimizer_step`` are separate, so that gradients of several rows, and later of several
meshes, can add up between them. What is minimized is in objective.py, by what in optimizer.py, columns and advantages
in preparation.py; nothing here depends on actors.

Dimensions: S trained tokens of a row.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import titan_rl.models.device as device  # isort: skip  (before any other torchtitan module)

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.mixture import teachers_of
from titan_rl.config.sections.schema import Config
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.spans import Spans
from titan_rl.data.types import TASK_COLUMN, Row, StepMetrics
from titan_rl.models.weights.quantized_files import Quantizer
from titan_rl.models.weights.shards import Shard
from titan_rl.trainer.distributed.ranks import (
    clipped_gradient_norm,
    is_finite_everywhere,
    is_first_of_rows,
    parallel_dims,
    reduced,
)
from titan_rl.trainer.model.optimizer import build_optimizer, set_optimizer
from titan_rl.trainer.model.sharded_model import Columns, make_sharded
from titan_rl.trainer.objective.nonfinite import find_nonfinite_samples
from titan_rl.trainer.objective.objective import (
    add_sums,
    expected_gradient,
    loss_and_sums,
    loss_inputs,
    rows_without_gradient,
    step_metrics,
    with_agreement_before,
    zero_totals,
)
from titan_rl.trainer.objective.preparation import (
    RowColumns,
    as_array,
    completed,
    with_advantages,
    with_placed_columns,
    with_role_columns,
)
from titan_rl.trainer.objective.whole_rollouts import JoinedLoss, joined_loss
from titan_rl.trainer.rank_interface import LearningModel, T, TrainerRank
from titan_rl.trainer.roles.frozen import FrozenRole, roles_with_trainer
from titan_rl.trainer.roles.learned.bridge import Bridge
from titan_rl.trainer.roles.learned.joint_step import joint_step
from titan_rl.trainer.roles.learned.registry import make_learned_role
from titan_rl.trainer.roles.learned.role import LearnedRole, LearnedRoleInterface, RoleResult
from titan_rl.trainer.roles.names import BASE, DRAFTER, WORDS, found_columns, role_paths
from titan_rl.trainer.roles.self_teacher import SelfTeacher
from titan_rl.trainer.state.checkpoint_state import (
    load_policy,
    load_random,
    load_role,
    policy_state,
    random_states,
    role_state,
)
from titan_rl.trainer.step.supervised import SupervisedSteps
from titan_rl.trainer.titan_config import TitanConfig, build_titan


@dataclass(frozen=True)
class Gradients:
    """Metrics of the clipped gradients that the parameters hold, not applied yet."""

    rows: list[Row]
    metrics: StepMetrics
    """Of all ranks together: the same on each."""
    role: LearnedRoleInterface | None
    """Learned role whose update on the rows is under way."""


def _algorithm(config: Config) -> Algorithm:
    algorithm = make_algorithm(config.algorithm, config.run.plugin_path, on_data=bool(config.data.file))
    if algorithm.needs.teacher:
        algorithm.tasks = tuple(teachers_of(config).of_task)
    return algorithm


class Learner(TrainerRank):
    """One rank's part of the policy, its algorithm, optimizer and schedule, and the roles beside it. The process group
    must be up."""

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        model_path: str | Path,
        initial_policy: str = "",
        bridge: Bridge | None = None,
    ):
        """``initial_policy``: directory of the policy as it was when reinforcement learning began, if it is saved;
        ``bridge``: to a learned role with its own processes."""
        self.config, self.titan, self.model_path = config, titan, Path(model_path)
        self.spans, self.step_values = Spans(), []
        self._supervised: SupervisedSteps | None = None
        self.device = device.local_device(dist.get_rank())
        self.parallel_dims = parallel_dims(titan.parallelism)
        self.algorithm = _algorithm(config)
        sharded = partial(make_sharded, config, titan, self.parallel_dims, self.device)
        replays_routing = config.algorithm.routing == "replay"
        self.policy = sharded(model_path, lora=config.lora, head=self.algorithm.head, replays_routing=replays_routing)
        if config.lora.rank:
            self.policy.adapt(config.lora, config.run.seed)
            self.has_views = True
        self.spec, self.model_parts, self.pipeline = self.policy.spec, self.policy.parts, self.policy.pipeline
        self.algorithm.implementation = self.policy.implementation
        self._roles = roles_with_trainer(
            *(config, self.algorithm.needs),
            paths_of=lambda role: role_paths(config, role, model_path, initial_policy),
            sharded=sharded,
            adapted=self.policy if self.policy.adapters and not (config.reference.path or initial_policy) else None,
        )
        needs = self.algorithm.needs
        initial = self._roles["reference"] if needs.self_teacher == "initial" else None
        self._self_teacher = SelfTeacher(self.policy, needs.teacher_words, initial)
        self.is_counted = is_first_of_rows(self.parallel_dims)
        """Whether this rank's rows are: of ranks that have the same ones, the first's."""
        self._sees = self.pipeline is None or self.pipeline.has_last
        """Whether this rank has the policy's head, and the columns of roles."""
        self.learned: LearnedRoleInterface | None = make_learned_role(
            *(config, titan, self.algorithm.needs, self.model_path, sharded, self.parallel_dims, bridge, self.policy),
            before_update=lambda: self.before_update(),
            reports=self._sees and self.is_counted,
        )
        """Learned role, or None."""
        num_updates = titan.training.steps * config.algorithm.updates_per_batch
        self.optimizer, self.scheduler = build_optimizer(titan, self.model_parts, num_updates)
        self.before_update: Callable[[], None] = lambda: None
        """Called before parameters change: somebody may still be copying them."""
        self.statistics: dict[int, torch.Tensor] = {}
        """Head outputs of each row of the last pass: log-probabilities and entropies [2, S], or values [1, S]; on ranks
        that have the head."""
        if config.lora.adapter:
            self.begin_learned()

    def take_settings(self, config: Config) -> None:
        """Apply changed settings; weights, moments and the place in the schedule stay."""
        self.config, self.titan = config, build_titan(config)
        algorithm = _algorithm(config)
        algorithm.implementation = self.algorithm.implementation
        self.algorithm = algorithm
        num_updates = self.titan.training.steps * config.algorithm.updates_per_batch
        set_optimizer(self.optimizer, self.scheduler, self.titan, self.model_parts, num_updates)

    # for the search for non-finite samples (objective/nonfinite.py)

    @property
    def gives(self) -> str:
        return "value" if self.algorithm.head == "value" else "logprob"

    @property
    def samples_per_loss(self) -> int:
        return 2 if self.algorithm.trains_on == "pairs" else 1

    @property
    def names_rows(self) -> bool:
        """Whether a sample's prompt names the row of data that it comes from."""
        return bool(self.config.data.file)

    # before the updates of a step

    def prepare(self, batches: list[list[Row]]) -> list[list[Row]]:
        """Rows of each update of a step, with columns of roles and final advantages."""
        return self._with_advantages(self._compared(batches))

    def gradients(self, rows: list[Row], role_columns: Sequence[RowColumns] = ()) -> Gradients | NonfiniteBatch:
        """Gradients of a step's single update, for a custom loop; ``apply_gradients`` follows."""
        self.optimizer.zero_grad()
        [prepared] = self.prepare(with_placed_columns([rows], role_columns))
        return self._make_gradients(prepared, role=None)

    def _compared(self, batches: list[list[Row]]) -> list[list[Row]]:
        """With what is found by roles that never learn, and by the policy itself as it is."""
        algorithm, finders = self.algorithm, [role.find for role in self.roles.values()]
        if algorithm.needs.proximal:
            finders.append(self._find_proximal)
        if algorithm.needs.self_teacher:
            finders.append(self._self_teacher.find)
        if not (finders or self.learned or self._changes_advantages):
            return batches
        return [completed(with_role_columns(self.policy.fit(rows), finders), self.zero_columns) for rows in batches]

    def _with_advantages(self, batches: list[list[Row]]) -> list[list[Row]]:
        """With what the role finds that learns, and refined by all that was found, if the algorithm asks for it."""
        if self.learned is not None:
            batches = [with_role_columns(rows, [self.learned.find]) for rows in batches]
        if not self._changes_advantages:
            return batches
        return with_advantages(self.algorithm, batches, self.policy, sees=self._sees, is_counted=self.is_counted)

    @property
    def _changes_advantages(self) -> bool:
        return self.algorithm.refines or self.algorithm.normalizes_batch

    def _find_proximal(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        return [{} if s is None else {"proximal_logprob_S": as_array(s[0])} for s in self.policy.measure(rows)]

    def train_step(
        self, batches: list[list[Row]], has_signal: list[bool], role_columns: Sequence[RowColumns] = ()
    ) -> list[StepMetrics | NonfiniteBatch]:
        """Train on one step; ``role_columns``: computed by roles in other processes."""
        with self.spans.span("roles"):
            batches = self._compared(with_placed_columns(batches, role_columns) if role_columns else batches)
        self.step_values = []
        moves = [signal or not self.algorithm.is_still_without_advantage for signal in has_signal]

        def updates(results: Sequence[RoleResult | None], waits: bool) -> list[StepMetrics | NonfiniteBatch]:
            may_move = [does and not waits for does in moves]
            updates_in_order = zip(self._with_advantages(batches), may_move, results, strict=True)
            answers = [self._recorded(rows, does, result) for rows, does, result in updates_in_order]
            return answers if self.algorithm.needs.proximal else with_agreement_before(answers, may_move)

        if self.learned is None:
            return updates([None] * len(batches), False)
        return joint_step(self.learned, batches, updates)

    def _recorded(
        self, rows: list[Row], has_signal: bool, role_result: RoleResult | None
    ) -> StepMetrics | NonfiniteBatch:
        result = self.train(rows, has_signal, role_result)
        self.step_values.append(self._step_values(rows, result))
        return result

    # an update

    def _loss(
        self, statistics: torch.Tensor, index: int, columns: Columns, totals: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """A row's loss, of what the head gave; its sums are added to ``totals``."""
        self.statistics[index] = statistics.detach().reshape(-1, statistics.shape[-1])
        loss, sums = loss_and_sums(self.algorithm, statistics, columns)
        add_sums(totals, sums)
        return loss

    def _joined(self, rows: list[Row]) -> JoinedLoss | None:
        """Loss of rollouts whose branches lie in several rows, if the algorithm needs whole rollouts."""
        if not self.algorithm.needs_whole_rollouts:
            return None
        loss = partial(loss_and_sums, self.algorithm)
        return joined_loss(self.policy, rows, loss, self._head_keywords, is_counted=self._sees and self.is_counted)

    def _head_keywords(self, columns: Columns) -> dict:
        """Arguments of the head besides its targets."""
        if self.algorithm.head == "value":
            return {}
        words = {"words_SK": columns[WORDS]} if WORDS in columns else {}
        return words | {
            "expected_grad": expected_gradient(self.algorithm, columns),
            "entropy_gradient": self.algorithm.needs.entropy_gradient,
        }

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Accumulate the gradients of rows; returns sums over trained tokens (``agreement_max``: a maximum).

        With a pipeline, the sums are zero but on the last stage.
        """
        rows = completed(self.policy.fit(rows), self.zero_columns)
        totals = zero_totals(self.algorithm, self.zero_columns(1), self.device)
        self.statistics.clear()
        still = rows_without_gradient(self.algorithm, rows, self.device)
        loss = partial(self._loss, totals=totals)
        if (joined := self._joined(rows)) is not None:
            rows, loss = joined.rows, joined.added_to(loss)
            add_sums(totals, joined.sums)
        self.policy.forward_backward(rows, loss, self._head_keywords, still)
        return totals

    def zero_columns(self, num_tokens: int) -> dict[str, np.ndarray]:
        """Zeros for all columns of roles, for ``num_tokens`` tokens."""
        needs = self.algorithm.needs
        proximal = {"proximal_logprob_S": np.zeros(num_tokens, np.float32)} if needs.proximal else {}
        role_columns = {} if self._active_role is None else self._active_role.zero_columns(num_tokens)
        tasks = {TASK_COLUMN: np.zeros(num_tokens, np.int64)} if self.algorithm.tasks else {}
        return found_columns(needs, num_tokens) | proximal | role_columns | tasks

    @property
    def _active_role(self) -> LearnedRoleInterface | None:
        """Learned role in the present updates; None in supervised steps."""
        return self.learned if self.algorithm.trains_on == "rollouts" else None

    def optimizer_step(self, has_signal: bool) -> float:
        """Step the optimizer and clear gradients; returns the learning rate.

        Without a signal the gradient is exactly zero: the optimizer is left alone, since its momentum would move the
        weights, and only the schedule advances.
        """
        learning_rate = self.optimizer.optimizers[0].param_groups[0]["lr"]
        if has_signal:
            self.before_update()
            self.optimizer.step()
            self.weights_changed()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(learning_rate)

    def weights_changed(self) -> None:
        if self.policy.adapters:
            self.policy.adapters.refresh()

    def gradient_norm(self) -> float:
        """Norm of all ranks' gradients; clips them to ``training.max_norm``."""
        return clipped_gradient_norm(self.model_parts, self.titan.training.max_norm, self.parallel_dims)

    def is_finite_everywhere(self, value: float) -> bool:
        """Whether a value is finite on all ranks; the same answer on each."""
        return is_finite_everywhere(value, self.device)

    def loss_of(self, row: Row, statistics: torch.Tensor) -> float:
        """Loss of a row from its log-probabilities and entropies [2, S], or values [1, S]."""
        columns = self.policy.columns(row)
        statistics = statistics[0] if self.algorithm.head == "value" else statistics
        loss, _ = self.algorithm.loss(loss_inputs(self.algorithm, statistics, columns, columns["offsets_N"]))
        return float(loss)

    def train(
        self, rows: list[Row], has_signal: bool, role_result: RoleResult | None = None
    ) -> StepMetrics | NonfiniteBatch:
        """One optimizer step on this rank's rows, after the learned role's; every rank gets the same metrics.

        If a loss or gradient is not finite, weights, moments and schedules stay as they were, on all ranks.
        ``role_result``: of the role's earlier update on these rows, if there was one.
        """
        if isinstance(role_result, NonfiniteBatch):
            return role_result
        with self.spans.span("forward and backward"):
            gradients = self._make_gradients(rows, role=self._active_role if role_result is None else None)
        if isinstance(gradients, NonfiniteBatch):
            return gradients
        with self.spans.span("optimizer"):
            return self.apply_gradients(gradients, has_signal, role_result)

    def _make_gradients(self, rows: list[Row], *, role: LearnedRoleInterface | None) -> Gradients | NonfiniteBatch:
        """``role``: to be updated on the rows concurrently."""
        if role is not None:
            role.begin(rows)
        start = time.perf_counter()
        totals = reduced(self.forward_backward(rows), is_counted=self.is_counted)
        middle = time.perf_counter()
        try:
            if not math.isfinite(totals["loss"]):
                raise FloatingPointError(f"the loss is {totals['loss']}")
            if not self.is_finite_everywhere(norm := self.gradient_norm()):
                raise FloatingPointError(f"the gradient norm is {norm}")
        except FloatingPointError as error:
            self.optimizer.zero_grad()
            if role is not None:
                role.forget()
            return find_nonfinite_samples(self, rows, str(error))
        seconds = dict(seconds_forward_backward=middle - start, seconds_optimizer=time.perf_counter() - middle)
        metrics = replace(step_metrics(totals), grad_norm=norm, **seconds)
        if (changed := self.policy.take_routing_changed()) is not None:
            metrics.loss_metrics["routing_changed"] = changed
        return Gradients(rows, metrics, role)

    def apply_gradients(
        self, gradients: Gradients, has_signal: bool, role_result: RoleResult | None = None
    ) -> StepMetrics | NonfiniteBatch:
        """Apply gradients. ``role_result``: of the role's earlier update on the rows, if there was one."""
        start = time.perf_counter()
        if gradients.role is not None:
            role_result = gradients.role.learn(gradients.rows)
        if isinstance(role_result, NonfiniteBatch):
            self.optimizer.zero_grad()
            return role_result
        learning_rate = self.optimizer_step(has_signal)
        return replace(
            gradients.metrics,
            loss_metrics=gradients.metrics.loss_metrics | (role_result or {}),
            learning_rate=learning_rate,
            seconds_optimizer=gradients.metrics.seconds_optimizer + time.perf_counter() - start,
        )

    def _step_values(self, rows: list[Row], result: StepMetrics | NonfiniteBatch) -> dict[int, np.ndarray]:
        """Recorded values of each row that this rank reports (mesh/telemetry/step_record.py)."""
        if self.gives != "logprob" or isinstance(result, NonfiniteBatch):
            return {}
        refined = self.learned is not None or self._changes_advantages
        row_logprobs = {index: values for index, values in self.logprobs().items() if index < len(rows)}
        if not refined:
            return {index: values[None] for index, values in row_logprobs.items()}
        return {index: np.stack([values, rows[index].advantage_S]) for index, values in row_logprobs.items()}

    def sft(self, batches: list[list[Row]], lr: float, num_steps: int = 0) -> list[float]:
        """The next supervised steps, by their own optimizer and schedule; returns their losses. Errors:
        FloatingPointError that names step and samples, if a loss or gradient is not finite."""
        steps = self._supervised = self._supervised or SupervisedSteps(self, lr, num_steps or len(batches))
        losses = steps.take(self, batches)
        if steps.is_over:
            self._supervised = None
            self.begin_learned()
        return losses

    def begin_learned(self) -> None:
        """Initialize the learned role from the policy, unless it has its own weights."""
        if self.learned is not None and not self.learned.settings.path:
            self.learned.init_from(self.policy)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trained parameters of policy and learned role, by name."""
        for part in self.model_parts:
            yield from part.named_parameters()
        if self.learned is not None:
            yield from self.learned.weights()

    @property
    def learned_here(self) -> LearnedRole | None:
        """Learned role in these processes, or None."""
        return self.learned if isinstance(self.learned, LearnedRole) else None

    @property
    def roles(self) -> dict[str, FrozenRole]:
        return self._roles

    def learning(self) -> dict[str, LearningModel]:
        role = self.learned_here
        return {"policy": self} if role is None else {"policy": self, role.name: role}

    def shards(self) -> list[Shard]:
        """The boxes of Hugging Face tensors that this rank holds; they stay current."""
        return self.policy.shards()

    def sent(self) -> list[Shard]:
        """What a version of the policy consists of: its boxes, and those of a draft model that learns."""
        role = self.learned_here
        drafts = role.shards() if role is not None and role.name == DRAFTER else []
        return self.shards() + [replace(shard, name=f"{DRAFTER}.{shard.name}") for shard in drafts]

    def digests(self) -> dict[str, str]:
        """Digests of frozen roles, and of the weights below adapters."""
        base = {BASE: self.policy.digest()} if self.policy.adapters else {}
        return base | {name: role.model.digest() for name, role in self.roles.items()}

    def save_hf(
        self,
        out: str | Path,
        adapter: str | Path = "",
        beside: str | Path = "",
        dtype: str = "auto",
        quantizer: Quantizer | None = None,
    ) -> None:
        self.policy.save(out, dtype, quantizer)
        if adapter and self.policy.adapters:
            self.policy.adapters.save(self.model_path, Path(adapter))
        if beside and self.learned_here is not None:
            self.learned_here.model.save(Path(beside) / self.learned_here.name, dtype)

    def logprobs(self) -> dict[int, np.ndarray]:
        """Log-probabilities [S] of each row of the last pass; empty where another rank reports them."""
        if not self.is_counted:
            return {}
        return {index: statistics[0].float().cpu().numpy() for index, statistics in self.statistics.items()}

    def share(self, groups: Sequence[T]) -> Sequence[T]:
        return [groups[self.titan.batch_rank(dist.get_rank())]]

    def state(self) -> dict[str, Any]:
        role = self.learned_here
        learned = {} if role is None else role_state(role.name, role)
        return policy_state(self, self._base) | learned | random_states()

    @property
    def _base(self) -> str | None:
        """Digest of the base weights; None without adapters."""
        return self.policy.adapters.base if self.policy.adapters else None

    @property
    def part(self) -> str:
        return ""

    def load_checkpoint(self, checkpoint: Path) -> None:
        self.before_update()
        load_policy(self, self._base, checkpoint)
        self.weights_changed()
        role = self.learned_here
        if role is not None and not load_role(role.name, role, checkpoint):
            self.begin_learned()
        load_random(checkpoint)
