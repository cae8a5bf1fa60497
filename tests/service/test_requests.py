"""Requests of the official SDK are read as it wrote them, and what no server of ours can do is one line."""

import json

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from titan_rl.data.types import Completion, PromptLogprobs
from titan_rl.service.wire.reading import BadRequest, Fields, checkpoint_name, read_adam, read_pass, read_sample
from titan_rl.service.wire.writing import pass_answer, sample_answer

_RL = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.5, -2.5], "advantages": [0.0, 0.5, -0.5]}


def _body(*inputs: dict, loss: str = "importance_sampling", tokens=(1, 2, 3), config=None, **changes) -> bytes:
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=columns) for columns in inputs
    ]
    wrapped = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=wrapped, model_id="s:train:0", seq_id=7)
    message = forward_backward_request_to_proto(request)
    for name, value in changes.items():
        setattr(message, name, value)
    return message.SerializeToString()


def test_a_pass_is_read_as_the_sdk_writes_it():
    request = read_pass(_body(_RL, _RL, config={"clip_low_threshold": 0.7}, loss="ppo"))
    assert (request.model, request.number, request.loss, request.backward) == ("s:train:0", 7, "ppo", True)
    assert request.settings == {"clip_low_threshold": 0.7}
    for example in request.examples:
        assert example.tokens.tolist() == [1, 2, 3] and example.targets.tolist() == [2, 3, 4]
        assert example.coefficients.tolist() == [0.0, 0.5, -0.5] and example.mask.tolist() == [1, 1, 1]
        assert example.sampling_logprobs.tolist() == [0.0, -1.5, -2.5]


def test_weights_of_a_cross_entropy_are_its_coefficients():
    request = read_pass(_body({"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 2.0]}, loss="cross_entropy"))
    [example] = request.examples
    assert example.coefficients.tolist() == [0.0, 1.0, 2.0] and not example.sampling_logprobs.any()


def test_a_sequence_s_ratio_is_over_its_mask():
    request = read_pass(_body({**_RL, "sequence_ratio_mask": [0.0, 1.0, 1.0]}, loss="gspo"))
    assert request.examples[0].mask.tolist() == [0, 1, 1]
    with pytest.raises(BadRequest, match="sequence_ratio_mask is 0"):
        read_pass(_body({**_RL, "sequence_ratio_mask": [1.0, 1.0, 0.0]}, loss="gspo"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff\xff\xff", "no ForwardBackwardRequest"),
        (_body(), "no example"),
        (_body({"target_tokens": [2, 3, 4]}), "lacks advantages"),
        (_body({**_RL, "target_tokens": [2, 3]}), "shape"),
        (_body({**_RL, "logprobs": [0.0, float("nan"), 0.0]}), "NaN"),
        (_body({**_RL, "clip_low_threshold": [0.0, 0.1, 0.2]}), "which no loss here reads"),
        (_body(_RL, config={"loss_id": "x"}), "only numbers"),
        (_body(_RL, seq_id=0), "seq_id"),
        (_body(_RL, tokens=()), "no tokens"),
    ],
)
def test_a_wrong_pass_is_one_line(body, words):
    with pytest.raises(BadRequest, match=words) as error:
        read_pass(body)
    assert "\n" not in str(error.value)


def _sample(**changes) -> bytes:
    request = types.SampleRequest(
        **{
            "prompt": types.ModelInput.from_ints([1, 2, 3]),
            "sampling_params": types.SamplingParams(max_tokens=5, stop=["\n\nUser:"], top_p=0.9, top_k=50, seed=4),
            "num_samples": 3,
            "sampling_session_id": "s:sample:0",
            "seq_id": 2,
            **changes,
        }
    )
    return json.dumps(request.model_dump(exclude_none=True, mode="json")).encode()


def test_a_request_for_samples_is_read_as_the_sdk_writes_it():
    request = read_sample(_sample(prompt_logprobs=True))
    assert (request.session, request.number, request.num_samples, request.max_tokens) == ("s:sample:0", 2, 3, 5)
    assert (request.temperature, request.seed, request.prompt_logprobs) == (1.0, 4, True)
    assert (request.decoding.top_p, request.decoding.top_k) == (0.9, 50)
    assert (request.decoding.stop, request.decoding.stop_tokens) == (("\n\nUser:",), ())
    assert request.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("stop", "texts", "tokens"), [(None, (), None), ([], (), ()), ([7, 8], (), (7, 8)), ("x", ("x",), ())]
)
def test_without_stops_the_model_s_own_end_an_answer_and_otherwise_they_alone(stop, texts, tokens):
    request = read_sample(_sample(sampling_params=types.SamplingParams(max_tokens=5, stop=stop)))
    assert (request.decoding.stop, request.decoding.stop_tokens) == (texts, tokens)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "no JSON object"),
        (_sample(num_samples=0), "num_samples"),
        (_sample(prompt=types.ModelInput.from_ints([])), "needs tokens"),
        (_sample(record_stability_info=True), "stable_reinforce"),
        (_sample(prompt_alt_tokens_k=2), "prompt_alt_tokens_k"),
        (_sample(sampling_params=types.SamplingParams(temperature=-1)), "temperature"),
        (_sample(sampling_params=types.SamplingParams(top_p=0)), "top_p"),
    ],
)
def test_a_wrong_request_for_samples_is_one_line(body, words):
    with pytest.raises(BadRequest, match=words) as error:
        read_sample(body)
    assert "\n" not in str(error.value)


def test_adam_s_settings_are_the_sdk_s_and_other_optimizers_are_refused():
    written = types.OptimStepRequest(optim_params=types.AdamParams(learning_rate=2e-5), model_id="m", seq_id=1)
    settings = read_adam(Fields.of(json.dumps(written.model_dump(mode="json")).encode()))
    assert (settings.lr, settings.betas, settings.eps, settings.max_norm) == (2e-5, (0.9, 0.95), 1e-12, 0.0)
    with pytest.raises(BadRequest, match="only Adam"):
        read_adam(Fields({"optimizer_params": {"type": "dimuon"}}))


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b", "x" * 200, "a\n"])
def test_a_checkpoint_s_name_stays_in_its_folder(name):
    with pytest.raises(BadRequest):
        checkpoint_name(name)


def test_answers_are_what_the_sdk_reads():
    logprobs = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    answer = deserialize_forward_backward_output(pass_answer(logprobs, {"loss:sum": 1.5}))
    assert answer.metrics == {"loss:sum": 1.5}
    assert [output["logprobs"].data for output in answer.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]

    prompt = PromptLogprobs(np.array([[0, 0], [4, 9]]), np.array([[np.nan, np.nan], [-0.5, -0.25]], np.float32))
    values = dict(logprobs=np.array([-1.0, -2.0], np.float32), versions=np.zeros(2, np.int32))
    completions = [
        Completion(np.array([5, 6], np.int32), stop_reason="length", prompt_logprobs=prompt, **values),
        Completion(np.array([7, 8], np.int32), stop_reason="stop_string", **values),
    ]
    read = deserialize_sample_response(sample_answer(completions))
    assert [(list(each.tokens), each.stop_reason) for each in read.sequences] == [([5, 6], "length"), ([7, 8], "stop")]
    assert read.sequences[0].logprobs == [-1.0, -2.0]
    assert read.prompt_logprobs == [None, -0.5]
    assert read.topk_prompt_logprobs is not None and read.topk_prompt_logprobs[1] == [(9, -0.25)]
