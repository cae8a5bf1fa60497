"""Entry of a trainer rank into its groups: the policy's ranks, then those of a learned role."""

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.sections.schema import Config
from titan_rl.trainer.distributed.process_group import join_group
from titan_rl.trainer.rank_interface import TrainerRank
from titan_rl.trainer.roles.learned.bridge import Bridge
from titan_rl.trainer.roles.learned.worker import LearnedRoleWorker
from titan_rl.trainer.roles.names import own_learned
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan, role_titan


def join_rank(
    config: Config, model_path: str, initial_policy: str, rank: int, world_size: int, rendezvous: str
) -> TrainerRank:
    """Join the process groups of a rank, and build its part of the models.

    ``initial_policy``: directory of the policy at the start of RL (``names.role_paths``); ``rendezvous``: as in
    ``join_group``."""
    titan = build_titan(config)
    seconds, policy_ranks = titan.comm.init_timeout_seconds, titan.world_size
    on_data = bool(config.data.file)
    role = own_learned(config, make_algorithm(config.algorithm, config.run.plugin_path, on_data=on_data).needs)
    if role is None:
        join_group(rank, world_size, rendezvous, seconds)
        return Learner(config, titan, model_path, initial_policy)
    is_policy = rank < policy_ranks
    if is_policy:
        join_group(rank, policy_ranks, rendezvous, seconds)
    else:
        ranks = rank - policy_ranks, world_size - policy_ranks
        join_group(*ranks, f"{rendezvous}.{role}", seconds, ranks_before=policy_ranks)
    bridge = Bridge(rank, world_size, policy_ranks, rendezvous, seconds)
    if is_policy:
        return Learner(config, titan, model_path, initial_policy, bridge)
    return LearnedRoleWorker(config, role_titan(config, role), model_path, initial_policy, bridge)
