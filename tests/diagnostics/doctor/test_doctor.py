"""Bugs of the actors, each planted by itself into the processes of one started mesh: the doctor names that check and no
other; and healthy meshes, of which it says nothing."""

import asyncio
import sys
from dataclasses import dataclass

import cloudpickle
import pytest

from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.diagnostics.doctor.actors_under_test import ActorsUnderTest
from titan_rl.diagnostics.doctor.catalogue import CHECKS
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.diagnostics.doctor.runner import run_checks

cloudpickle.register_pickle_by_value(sys.modules[__name__])
OVERRIDES = {
    "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
    "eval": {"prompts": 4},
}
"""A task with a tool, in several turns, and a reference."""


@dataclass(frozen=True)
class Plant:
    where: str
    """``trainer``, ``generators`` or ``verifiers``."""
    put: object
    """Given the learner, engine or verifier; gives back what takes the bug out again."""
    check: str


def set_on(owner, name, value):
    before = vars(owner).get(name, set_on)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if before is set_on else setattr(owner, name, before)


def sampling(**settings):
    def put(engine):
        from titan_rl.generator import vllm_requests as module

        made = module.SamplingParams
        return set_on(module, "SamplingParams", lambda **given: made(**(given | settings)))

    return put


def bos_in_engine(engine):
    add = engine._engine.add_request

    def with_bos(request_id, prompt, parameters):
        return add(request_id, prompt | {"prompt_token_ids": [5, *prompt["prompt_token_ids"]]}, parameters)

    return set_on(engine._engine, "add_request", with_bos)


def end_dropped(engine):
    from titan_rl.generator import engine as module

    made = module.Completion

    def without_end(tokens, logprobs, versions, stop_reason, **_):
        count = len(tokens) - (stop_reason == "stop" and len(tokens) > 1)
        return made(tokens[:count], logprobs[:count], versions[:count], stop_reason)

    return set_on(module, "Completion", without_end)


def salt_forgotten(engine):
    add = engine._engine.add_request
    return set_on(engine._engine, "add_request", lambda i, prompt, p: add(i, prompt | {"cache_salt": "x"}, p))


def update_skipped(engine):
    return set_on(engine, "_load", lambda version: None)


def old_label(engine):
    load = engine._load

    def and_relabel(version):
        load(version)

    undo = set_on(engine, "_load", and_relabel)
    take = engine._finish

    def finish(output):
        sample = engine._samples[output.request_id]
        sample.versions[:] = [(begin, version - 1) for begin, version in sample.versions]
        take(output)

    undo_finish = set_on(engine, "_finish", finish)
    return lambda: (undo(), undo_finish())


def head_not_repacked(engine):
    from titan_rl.generator.weights import vllm_backend

    return set_on(vllm_backend, "_repack_tied", lambda model: None)


def hotter_trainer(learner):
    return set_on(learner.policy, "temperature", 1.3)


def shifted_advantages(learner):
    columns = learner.policy.columns

    def shifted(row):
        found = columns(row)
        found["advantage_S"] = found["advantage_S"].roll(1)
        return found

    return set_on(learner.policy, "columns", shifted)


def loss_by_row(learner):
    loss = learner._loss

    def of_row(statistics, index, columns, totals):
        return loss(statistics, index, columns, totals) / columns["target_S"].numel()

    return set_on(learner, "_loss", of_row)


def climbing(learner):
    """The sign of the gradient is lost."""
    for optimizer in learner.optimizer.optimizers:
        for group in optimizer.param_groups:
            group["maximize"] = True

    def undo():
        for optimizer in learner.optimizer.optimizers:
            for group in optimizer.param_groups:
                group["maximize"] = False

    return undo


def moved_without_rate(learner):
    step = learner.optimizer.step

    def and_decay():
        import torch

        step()
        with torch.no_grad():
            for part in learner.model_parts:
                for parameter in part.parameters():
                    parameter.mul_(0.999)

    return set_on(learner.optimizer, "step", and_decay)


def reference_in_optimizer(learner):
    """With moments, as if the optimizer had been built so."""
    import torch

    parameter = next(learner.roles["reference"].model.parts[0].parameters())
    [optimizer] = learner.optimizer.optimizers
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.param_groups[0]["params"].append(parameter)
    optimizer.state[parameter] = {"step": torch.zeros(())} | moments

    def undo():
        optimizer.param_groups[0]["params"].pop()
        del optimizer.state[parameter]

    return undo


def reference_follows(learner):
    changed = learner.weights_changed

    def and_reference():
        import torch

        changed()
        with torch.no_grad():
            for parameter in learner.roles["reference"].model.parts[0].parameters():
                parameter.mul_(0.999)

    return set_on(learner, "weights_changed", and_reference)


def other_weights(learner):
    """As of a stale shard: one tensor is another one."""
    import torch

    with torch.no_grad():
        learner.policy.shards()[3].tensor.mul_(1.01)
    return lambda: None


def bos_in_verifier(verifier):
    import numpy as np

    from titan_rl.environments.rollout import group

    encode = group.encode_with_images

    def with_bos(*given):
        tokens, images = encode(*given)
        return np.insert(tokens, 0, 5).astype(np.int32), [image.moved(1) for image in images]

    return set_on(group, "encode_with_images", with_bos)


def other_special_tokens(verifier):
    before = verifier.tokenizer.eos_token
    verifier.tokenizer.eos_token = "<unk>"

    def undo():
        verifier.tokenizer.eos_token = before

    return undo


def prompt_in_mask(verifier):
    from titan_rl.environments.conversation.episode import Episode

    finish = Episode.finish

    def with_prompt(self, *given):
        self.provenance[self.turns[0].start - 1] = 1
        return finish(self, *given)

    return set_on(Episode, "finish", with_prompt)


def end_not_in_mask(verifier):
    from titan_rl.environments.conversation.episode import Episode

    finish = Episode.finish

    def without_last(self, *given):
        self.provenance[self.turns[-1].stop - 1] = 0
        return finish(self, *given)

    return set_on(Episode, "finish", without_last)


def end_forgotten(engine):
    return set_on(engine, "stop_token_ids", [])


def nan_at_weight_0(learner):
    loss = learner.algorithm.loss

    def leaky(inputs):
        value, counted = loss(inputs)
        return value + 0.0 * (inputs.logprob_S * inputs.weight_S).sum(), counted

    return set_on(learner.algorithm, "loss", leaky)


def cooler_reference(learner):
    return set_on(learner.roles["reference"].model, "temperature", 0.7)


PLANTS = {
    "top-p is not mirrored": Plant("generators", sampling(top_p=0.7), "agreement"),
    "a temperature is not mirrored": Plant("generators", sampling(temperature=0.7), "agreement"),
    "a penalty is not mirrored": Plant("generators", sampling(repetition_penalty=1.3), "agreement"),
    "the trainer's temperature is its own": Plant("trainer", hotter_trainer, "agreement"),
    "a BOS is added by the engine": Plant("generators", bos_in_engine, "tokens"),
    "a BOS is added by the verifier": Plant("verifiers", bos_in_verifier, "tokens"),
    "special tokens differ": Plant("verifiers", other_special_tokens, "tokens"),
    "the EOS is dropped": Plant("generators", end_dropped, "ends"),
    "no stop token is known": Plant("generators", sampling(stop_token_ids=[], ignore_eos=True), "ends"),
    "a prompt's token is in the mask": Plant("verifiers", prompt_in_mask, "mask"),
    "the last token is not in the mask": Plant("verifiers", end_not_in_mask, "mask"),
    "a loss is normalized by row": Plant("trainer", loss_by_row, "layout"),
    "advantages are shifted": Plant("trainer", shifted_advantages, "advantages"),
    "the sign is lost": Plant("trainer", climbing, "advantages"),
    "weights move without a rate": Plant("trainer", moved_without_rate, "still"),
    "an update is skipped": Plant("generators", update_skipped, "sync"),
    "tokens have an old version": Plant("generators", old_label, "sync"),
    "a tied head is not repacked": Plant("generators", head_not_repacked, "sync"),
    "the cache is not reset": Plant("generators", salt_forgotten, "cache"),
    "the reference is in the optimizer": Plant("trainer", reference_in_optimizer, "reference"),
    "the reference moves": Plant("trainer", reference_follows, "reference"),
    "a tensor is of another file": Plant("trainer", other_weights, "weights"),
    "an end token does not stop the engine": Plant("generators", end_forgotten, "ends"),
    "NaN at weight 0": Plant("trainer", nan_at_weight_0, "unweighed"),
    "the reference has a temperature of its own": Plant("trainer", cooler_reference, "reference"),
}


def planting(put):
    def plant(subject):
        sys.modules["titan_rl"].planted = put(subject)

    return plant


def uproot(subject):
    sys.modules["titan_rl"].planted()


def as_it_was(learner):
    learner.policy.load(learner.model_path)
    for role in learner.roles.values():
        role.model.load(learner.model_path)


class Ward:
    """One mesh, in a loop of its own."""

    def __init__(self, config, folder):
        self.checked, self.folder, self.loop = check(config), folder, asyncio.new_event_loop()
        self.actors = ActorsUnderTest(self.checked, folder)
        self.loop.run_until_complete(self.actors.__aenter__())

    def close(self):
        self.loop.run_until_complete(self.actors.__aexit__(None, None, None))
        self.loop.close()

    def examine(self, plant: Plant | None = None):
        return self.loop.run_until_complete(self._examine(plant))

    async def _examine(self, plant):
        await self.actors.ask_trainer(as_it_was)
        await self.actors.sync()
        ask = {
            "trainer": self.actors.ask_trainer,
            "generators": self.actors.ask_generators,
            "verifiers": self.actors.ask_verifiers,
        }
        if plant is not None:
            await ask[plant.where](planting(plant.put))
        try:
            context = CheckContext(self.checked, self.folder, self.actors)
            return await run_checks(context, [each for each in CHECKS if each.needs], lambda finding: None)
        finally:
            if plant is not None:
                await ask[plant.where](uproot)


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    ward = Ward(load_config("calculator_tiny", OVERRIDES), tmp_path_factory.mktemp("ward"))
    yield ward
    ward.close()


def wrong(findings):
    return {finding.check.name: finding.line() for finding in findings if finding.status == "wrong"}


@pytest.mark.slow
def test_a_healthy_run_in_several_turns_passes(ward):
    findings = ward.examine()
    assert not wrong(findings)
    assert all(finding.status == "passed" for finding in findings), [finding.line() for finding in findings]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_named_and_no_other(ward, name):
    found = wrong(ward.examine(PLANTS[name]))
    assert set(found) == {PLANTS[name].check}, found
