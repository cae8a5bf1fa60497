"""The roles that learn beside the policy, by name. A run has at most one (controller/preflight/role_checks.py)."""

from collections.abc import Callable
from pathlib import Path

from torchtitan.distributed import ParallelDims

from titan_rl.algorithms.base import Needs
from titan_rl.config.sections.schema import Config
from titan_rl.trainer.model.draft_head import HEADS
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.roles.learned.bridge import Bridge
from titan_rl.trainer.roles.learned.client import LearnedRoleClient
from titan_rl.trainer.roles.learned.critic import Critic
from titan_rl.trainer.roles.learned.drafter import Drafter
from titan_rl.trainer.roles.learned.implicit_reward import ImplicitReward
from titan_rl.trainer.roles.learned.role import LearnedRole, LearnedRoleInterface
from titan_rl.trainer.roles.names import DRAFTER, learned_role
from titan_rl.trainer.titan_config import TitanConfig

LEARNED_ROLES: dict[str, type[LearnedRole]] = {role.name: role for role in (Critic, ImplicitReward, Drafter)}


def make_learned_role(
    config: Config,
    titan: TitanConfig,
    needs: Needs,
    model_path: Path,
    sharded: Callable[..., ShardedModel],
    parallel_dims: ParallelDims,
    bridge: Bridge | None,
    policy: ShardedModel,
    *,
    before_update: Callable[[], None],
    reports: bool,
) -> LearnedRoleInterface | None:
    """Learned role of the run, for a rank of the policy.

    ``model_path``: directory that ``policy`` starts from;
    ``sharded(path, head=...)``: makes a model; ``bridge``: to its own processes, if it has such; ``before_update``:
    called before its parameters change; ``reports``: as LearnedRoleClient has it."""
    if (name := learned_role(config, needs)) is None:
        return None
    role = LEARNED_ROLES[name]
    if bridge is not None:
        return LearnedRoleClient(config, role, bridge, reports=reports)
    path = getattr(config, name).path or model_path
    if name == DRAFTER and (head := HEADS.get(config.generator.speculative.method)):
        model = head(config, titan, parallel_dims, path, policy)
    else:
        model = sharded(path, head=role.head)
    return role(config, titan, model, parallel_dims, before_update)
