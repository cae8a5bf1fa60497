"""Catalogue of checks in order; a check is skipped when an earlier one explains it (``after``)."""

from titan_rl.diagnostics.doctor.checks import arithmetic, layouts, machinery, rewards, text, tokens, weights
from titan_rl.diagnostics.doctor.findings import Check
from titan_rl.diagnostics.doctor.probes import bandit

_TRAINER = frozenset({"trainer"})
_ALL = frozenset({"trainer", "generators", "verifiers"})

CHECKS = (
    # before any actor is started
    Check(
        name="reward-signal",
        about="the reward tells right answers from wrong ones",
        mend="Look at task.reward (or task.rewards, task.scoring) with a right answer and a wrong one in hand",
        run=rewards.signal,
    ),
    Check(
        name="reward-form",
        about="the form of an answer alone earns little",
        mend="Pay for being right; let a form cost something where it is missing, or pay it a tenth",
        run=rewards.form,
        after=("reward-signal",),
    ),
    Check(
        name="reward-forged",
        about="answers that say nothing earn little",
        mend=rewards.READ_STRICTLY,
        run=rewards.forged,
        after=("reward-signal", "reward-form"),
    ),
    Check(
        name="reward-leak",
        about="the prompt does not tell its answer",
        mend="Take the expected answer out of the prompt's text",
        run=rewards.leak,
        after=("reward-signal", "reward-form", "reward-forged"),
    ),
    Check(
        name="branches",
        about="a rollout weighs the same whatever number of sequences it became, and its reward reaches each",
        mend="See that weights and rewards are the rollout's, not the sequence's (algorithms/batches/batching.py)",
        run=arithmetic.branches,
    ),
    Check(
        name="magnitude",
        about="rewards that are equal but for rounding teach nothing, and those that cancel no more than others",
        mend="Divide by nothing that may be almost 0: see the algorithm's advantages",
        run=arithmetic.magnitude,
    ),
    Check(
        name="deadline",
        about="an answer that hangs its scorer is given up in time",
        mend="Raise verifier.score_timeout, or make the reward faster; a deadline that does not hold is a bug of ours",
        run=machinery.deadline,
    ),
    Check(
        name="sandbox",
        about="programs that a model wrote stay in their box",
        mend="Run no code that a model wrote on this machine until it holds: see docs/concepts/sandbox.md",
        run=machinery.sandbox,
    ),
    Check(
        name="text",
        about="prompts, worked answers and replies are what the model's template and tokenizer write",
        mend="Let data/text alone turn text into tokens, with the template's variant, beginning and end",
        run=text.written,
    ),
    # of the actors
    Check(
        name="weights",
        about="the weights that were loaded are those that the index names",
        mend="Move away what does not belong to the model, or copy its directory anew",
        run=weights.loaded,
        needs=_TRAINER,
    ),
    Check(
        name="unweighed",
        about="a token of weight 0 makes nothing NaN",
        mend="Leave such tokens out with torch.where before a loss is made of them: NaN times 0 is NaN",
        run=layouts.unweighed,
        needs=_TRAINER,
    ),
    Check(
        name="tokens",
        about="tokenizer, template and special tokens are the same on both sides",
        mend="Copy the tokenizer that belongs to the model into its directory; let nothing add a token to a prompt",
        run=tokens.same_tokens,
        needs=_ALL,
    ),
    Check(
        name="mask",
        about="the loss has exactly the tokens that the model wrote",
        mend="See who marks a token (environments/) and who reads the marks (data/batches/packing.py)",
        run=tokens.trained_tokens,
        needs=_ALL,
        after=("tokens",),
    ),
    Check(
        name="penalties",
        about="trainer and engine penalize logits for the same words",
        mend="See who says where an answer begins (conversation/episode.py) and who counts (layers/penalties.py)",
        run=tokens.penalties,
        needs=_ALL,
        after=("weights", "tokens", "mask"),
    ),
    Check(
        name="sampling-mask",
        about="the tokens that each one was sampled from are those that the trainer renormalizes over",
        mend="See who makes a mask (compat/vllm/sampling.py) and who cuts and joins it (data/storage/sampling_mask.py)",
        run=tokens.sampling_mask,
        needs=_ALL,
        after=("weights", "tokens", "mask", "penalties"),
    ),
    Check(
        name="agreement",
        about="trainer and generator agree about each token at the run's own temperature",
        mend="Let both sides have the same temperature, top-p, penalties and weights",
        run=tokens.agreement,
        needs=_ALL,
        after=("weights", "tokens", "mask", "penalties", "sampling-mask"),
    ),
    Check(
        name="ends",
        about="an answer ends with a stop token, which is trained, and about which both sides agree",
        mend="Keep the last token of an answer; eos_token_id in generation_config.json names those that end one",
        run=tokens.ends,
        needs=_ALL,
        after=("tokens", "mask", "penalties", "sampling-mask", "agreement"),
    ),
    Check(
        name="still",
        about="a learning rate of 0 changes no weight, and a sync of the same weights no answer",
        mend="Look for what moves weights beside the optimizer, and for randomness that no seed names",
        run=weights.still,
        needs=_ALL,
        after=("tokens", "mask", "penalties", "sampling-mask", "agreement"),
    ),
    Check(
        name="advantages",
        about="an update raises the answer that was rewarded",
        mend="See that advantages keep the order of samples and tokens, and the sign of the loss",
        run=bandit.advantages,
        needs=_ALL,
        after=("tokens", "mask", "penalties", "sampling-mask", "agreement", "still"),
    ),
    Check(
        name="layout",
        about="the loss does not depend on microbatching, packing or layout",
        mend="Normalize the loss over the step's trained tokens, before they are packed (data/batches/packing.py)",
        run=layouts.layout,
        needs=_ALL,
        after=("tokens", "mask", "penalties", "sampling-mask", "agreement", "advantages"),
    ),
    Check(
        name="sync",
        about="after an update generators have the new weights, all of them, and say so",
        mend="See mesh/channel/ and generator/vllm_backend.py: what is published, fetched and repacked",
        run=weights.sync,
        needs=_ALL,
        after=("tokens", "mask", "penalties", "sampling-mask", "agreement", "still"),
    ),
    Check(
        name="cache",
        about="a prompt that was sampled before an update is answered by the weights after it",
        mend="Reset the prefix cache with every version, or salt it with one",
        run=weights.cache,
        needs=_ALL,
        after=("tokens", "mask", "penalties", "sampling-mask", "agreement", "still", "sync"),
    ),
    Check(
        name="reference",
        about="frozen models stay unchanged",
        mend="Keep reference and teacher out of the optimizer, and their memory apart from the policy's",
        run=weights.reference,
        needs=_ALL,
        after=("tokens", "mask", "penalties", "sampling-mask", "agreement"),
    ),
    Check(
        name="memory",
        about="the run fits into memory, as planned and as measured",
        mend="Take a smaller model, [lora], or recovery.snapshot_every = 0; `titan-rl plan` shows memory by process",
        run=machinery.memory,
        needs=_TRAINER,
    ),
)
