"""Engines in FP8, and engines with the trainer's bits: healthy as they are, and a small fault in them is named."""

import sys

import cloudpickle
import pytest
from test_doctor import Plant, Ward, set_on, wrong

from titan_rl.config.load import load_config
from titan_rl.diagnostics.doctor.probes.agreement import limits

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def doubled_scale(engine):
    """Of one layer, from the next version on."""

    def plant(worker):
        method = worker.model_runner.model.model.layers[0].mlp.down_proj.quant_method
        product_of = method.product_of
        return set_on(method, "product_of", lambda weight: product_of(2 * weight))

    return engine.on_worker(plant)


@pytest.mark.slow
def test_a_wrong_scale_is_named(tmp_path):
    settings = {"rollout": {"prompts_per_step": 4, "group_size": 4}, "generator": {"quantization": "fp8_per_block"}}
    settings |= {"float8": {"recipe_name": "none"}}
    ward = Ward(load_config("fp8_tiny", settings), tmp_path)
    try:
        findings = ward.examine(Plant("generators", doubled_scale, "sync"))
    finally:
        ward.close()
    [sync] = wrong(findings).values()
    assert "sync: an engine's FP8 layer multiplies by other weights than it received" in sync
    assert "model.layers.0.mlp.down_proj and 0 more" in sync
    agreement = next(finding.line() for finding in findings if finding.check.name == "agreement")  # before the update
    exact, fp8 = limits("float32", "float32"), limits("float32", "float32", fp8=True)
    assert exact.mean < float(agreement.rsplit(" ", 1)[1]) < fp8.mean


def rounded_otherwise(engine):
    """Logits are too large by a millionth, a few of their last places."""

    def plant(worker):
        processor = worker.model_runner.model.logits_processor
        apply_head = processor._apply_head
        return set_on(processor, "_apply_head", lambda *args: apply_head(*args) * (1 + 2**-20))

    return engine.on_worker(plant)


@pytest.mark.slow
def test_engine_and_trainer_have_equal_bits(tmp_path):
    """In bf16, before and after an update, with prompts from the cache; a difference in the last places is named.

    Of two trainer ranks that share layers, and of engines of two such ranks."""
    settings = {"rollout": {"prompts_per_step": 4, "group_size": 4}, "debug": {"batch_invariant": True}}
    settings |= {"generator": {"dtype": "bfloat16", "tensor_parallel": 2}}
    settings |= {"training": {"mixed_precision_param": "bfloat16"}, "parallelism": {"tensor_parallel_degree": 2}}
    ward = Ward(load_config("quickstart", settings), tmp_path)
    try:
        healthy = ward.examine()
        findings = ward.examine(Plant("generators", rounded_otherwise, "agreement"))
    finally:
        ward.close()
    assert not wrong(healthy)
    said = {finding.check.name: finding.line() for finding in healthy}
    assert all("the same, bit for bit" in said[name] for name in ("agreement", "sync", "cache"))
    assert "(at most 1)" in wrong(findings)["agreement"]
