"""An algorithm that asks for all that is found out before a step's first update."""

import torch

from titan_rl.algorithms.base import Algorithm, Needs, Refined


class AsksForAll(Algorithm):
    """Rewards at tokens less the distance from the reference, summed to each sample's end and normalized over the step;
    the ratio is to the proximal policy, weighed by how far that one is from the sampler."""

    needs = Needs(reference=True, proximal=True)
    normalizes_batch = True
    is_still_without_advantage = False

    def advantages(self, rollouts):
        return [rollout.reward for rollout in rollouts]

    def refine(self, inputs):
        reward_S = inputs.advantage_S - 0.1 * (inputs.sampling_logprob_S - inputs.reference_logprob_S)
        ends = inputs.offsets_N.tolist()
        to_come = [reward_S[a:b].flip(0).cumsum(0).flip(0) for a, b in zip(ends, ends[1:], strict=False)]
        return Refined(torch.cat(to_come))

    def loss(self, inputs):
        ratio_S = (inputs.logprob_S - inputs.proximal_logprob_S).exp()
        weight_S = inputs.weight_S * (inputs.proximal_logprob_S - inputs.sampling_logprob_S).exp().clamp(max=2)
        distance_S = (inputs.logprob_S - inputs.reference_logprob_S).square()
        loss = ((0.1 * distance_S - ratio_S * inputs.advantage_S) * weight_S).sum()
        return loss, {"distance": (distance_S * (inputs.weight_S > 0)).sum()}
