"""Requests of the Tinker API, checked: what a client sends is hostile until it has been read here.

Every refusal is a BadRequest with one line. Dimensions: T tokens of an example.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from titan_rl.config.io.bounded_files import each_once, parse_json
from titan_rl.data.types import Decoding
from titan_rl.mesh.members.adapter_endpoints import AdamSettings
from titan_rl.service.rows import TrainingExample
from titan_rl.service.wire.messages import BFLOAT16, FLOAT32, INT32, INT64, message

MOST_SAMPLES = 1024
"""Of one request."""
_MOST_TOKENS = 1 << 22
"""Of one request's examples together."""
_COEFFICIENTS = {"cross_entropy": "weights"}
"""Column that a loss takes its coefficients from, where it is not ``advantages``."""
_COLUMNS = ("target_tokens", "weights", "advantages", "logprobs", "mask", "sequence_ratio_mask")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4"), BFLOAT16: np.dtype("<u2")}


class BadRequest(ValueError):
    """Request that cannot be read or done; one line says why."""


@dataclass(frozen=True)
class PassRequest:
    """Forward and backward pass, or a forward pass alone."""

    model: str
    number: int
    """Of the client's requests, from 1 on: in their order they are done."""
    examples: list[TrainingExample]
    loss: str
    settings: dict[str, float]
    backward: bool


@dataclass(frozen=True)
class SampleRequest:
    """Request for samples of one prompt."""

    session: str
    """Sampling session; empty: ``path`` or ``base_model`` says what is sampled from."""
    number: int
    tokens: np.ndarray
    num_samples: int
    max_tokens: int | None
    """None: up to the longest that the server allows."""
    temperature: float
    seed: int | None
    decoding: Decoding
    prompt_logprobs: bool
    topk_prompt_logprobs: int
    path: str = ""
    base_model: str = ""


@dataclass(frozen=True)
class Fields:
    """Fields of a JSON request, read one by one."""

    values: Mapping[str, Any]
    kind: str = "the request"
    read: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, body: bytes) -> "Fields":
        try:
            values = parse_json(body, pairs=each_once) if body.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"this is not JSON: {str(error).splitlines()[0][:200]}") from None
        if not isinstance(values, dict):
            raise BadRequest("this is no JSON object")
        return cls(values)

    def text(self, name: str, default: str | None = None, *, longest: int = 512) -> str:
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > longest:
            raise BadRequest(f"{name} must be a text of at most {longest} characters")
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**62) -> int:
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise BadRequest(f"{name} must be a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0, most: float = 1e6) -> float:
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise BadRequest(f"{name} must be a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false")
        return value

    def table(self, name: str) -> "Fields":
        value = self._take(name, {})
        if not isinstance(value, dict):
            raise BadRequest(f"{name} must be an object")
        return Fields(value, name)

    def items(self, name: str, *, most: int) -> list[Any]:
        value = self._take(name, None)
        if not isinstance(value, list) or len(value) > most:
            raise BadRequest(f"{name} must be a list of at most {most}")
        return value

    def has(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        return self.values.get(name) is not None

    def _take(self, name: str, default: Any) -> Any:
        self.read.add(name)
        value = self.values.get(name)
        if value is None and default is None:
            raise BadRequest(f"{self.kind} lacks {name}")
        return default if value is None else value


def checkpoint_name(name: str) -> str:
    """Name that is safe as a folder's. Errors: BadRequest."""
    if not 0 < len(name) <= 128 or not set(name) <= _NAME or name.startswith("."):
        raise BadRequest(f"{name[:40]!r} is no name for a checkpoint: take letters, digits, '.', '_' and '-'")
    return name


# passes


def read_pass(body: bytes) -> PassRequest:
    """Read a forward and backward request. Errors: BadRequest."""
    try:
        request = message("ForwardBackwardRequest").FromString(body)
    except (DecodeError, ValueError):
        raise BadRequest("this is no ForwardBackwardRequest") from None
    settings = {name: float(value) for name, value in request.loss_fn_config.items()}
    for name, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise BadRequest(f"loss_fn_config has {name[:40]!r} = {value.text[:40]!r}: only numbers are known here")
        settings[name] = value.number
    if not all(map(math.isfinite, settings.values())):
        raise BadRequest("loss_fn_config has a number that is not finite")
    if not request.data:
        raise BadRequest("there is no example")
    if request.seq_id < 1:
        raise BadRequest("seq_id must be 1 or more")
    examples = [_example(datum, f"example {place}", request.loss_fn) for place, datum in enumerate(request.data)]
    if sum(len(example.tokens) for example in examples) > _MOST_TOKENS:
        raise BadRequest(f"a request has at most {_MOST_TOKENS} tokens: send it in parts")
    names = dict(loss=request.loss_fn, settings=settings, backward=not request.forward_only)
    return PassRequest(request.model_id, request.seq_id, examples, **names)


def _example(datum: Any, where: str, loss: str) -> TrainingExample:
    tokens = _tokens(datum.model_input, where)
    inputs = dict(datum.loss_fn_inputs)
    if unknown := next((name for name in inputs if name not in _COLUMNS), None):
        raise BadRequest(f"{where} has {unknown[:40]!r}, which no loss here reads: it reads {', '.join(_COLUMNS)}")
    column = _COEFFICIENTS.get(loss, "advantages")

    def values(name: str, dtype: str) -> np.ndarray:
        if name not in inputs:
            raise BadRequest(f"{where} lacks {name}, which {loss[:40]!r} needs")
        array = _tensor(inputs[name], f"{where}: {name}")
        if array.shape != tokens.shape:
            raise BadRequest(f"{where}: {name} has the shape {list(array.shape)}, and there are {len(tokens)} tokens")
        if not np.isfinite(array).all():
            raise BadRequest(f"{where}: {name} holds NaN or infinities")
        return array.astype(dtype)

    coefficients, mask = values(column, "float32"), np.ones(len(tokens), np.float32)
    if loss != "cross_entropy" and "mask" in inputs:
        coefficients = coefficients * values("mask", "float32")
    if loss == "gspo":
        mask = (values("sequence_ratio_mask", "float32") != 0).astype(np.float32)
        if (coefficients * (1 - mask)).any():
            raise BadRequest(f"{where} has an advantage where sequence_ratio_mask is 0: set it to 0 there")
    sampling = np.zeros_like(mask) if loss == "cross_entropy" else values("logprobs", "float32")
    return TrainingExample(tokens, values("target_tokens", "int64"), coefficients, sampling, mask)


def _tokens(chunks: Any, where: str) -> np.ndarray:
    parts = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise BadRequest(f"{where} has a part that is no text: this server reads text alone")
        if len(chunk.encoded_text.tokens) % 4:
            raise BadRequest(f"{where}: its tokens are cut")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not len(tokens):
        raise BadRequest(f"{where} has no tokens")
    return tokens


def _tensor(tensor: Any, where: str) -> np.ndarray:
    if tensor.dtype not in _DTYPES:
        raise BadRequest(f"{where} has an unknown dtype")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise BadRequest(f"{where} is sparse: several targets of a position are not known here")
    dtype = _DTYPES[tensor.dtype]
    if len(tensor.dense) % dtype.itemsize:
        raise BadRequest(f"{where} is cut")
    values = np.frombuffer(tensor.dense, dtype)
    if tensor.dtype == BFLOAT16:
        values = (values.astype("<u4") << 16).view("<f4")
    shape = list(tensor.shape) or [len(values)]
    if any(size < 0 for size in shape) or math.prod(shape) != len(values):
        raise BadRequest(f"{where} has {len(values)} values, and the shape {shape[:8]}")
    return values.reshape(shape)


def read_adam(fields: Fields) -> AdamSettings:
    """Read ``adam_params`` of an optimizer step. Errors: BadRequest."""
    if fields.has("optimizer_params"):
        raise BadRequest("only Adam is known here: give AdamParams")
    adam = fields.table("adam_params")
    settings = AdamSettings(
        lr=adam.number("learning_rate", 1e-4),
        betas=(adam.number("beta1", 0.9, most=0.999999), adam.number("beta2", 0.95, most=0.999999999)),
        eps=adam.number("eps", 1e-12, most=1.0),
        weight_decay=adam.number("weight_decay", 0.0),
        max_norm=max(adam.number("grad_clip_norm", 0.0, least=-1e9, most=1e9), 0.0),
    )
    return settings


# samples


def read_sample(body: bytes) -> SampleRequest:
    """Read a request for samples. Errors: BadRequest."""
    fields = Fields.of(body)
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "topk_sample_logprobs", "prompt_logprobs_last_n"):
        if fields.values.get(name):
            raise BadRequest(f"{name} is not known here: leave it out")
    if fields.values.get("record_stability_info"):
        raise BadRequest("stable_reinforce is not known here: take importance_sampling, ppo or cispo")
    settings = fields.table("sampling_params")
    topk = settings.whole("top_k", -1, least=-1, most=2**31 - 1)
    stop_texts, stop_tokens = _stops(settings.values.get("stop"))
    decoding = Decoding(
        top_p=settings.number("top_p", 1.0, most=1.0), top_k=max(topk, 0), stop=stop_texts, stop_tokens=stop_tokens
    )
    if decoding.top_p <= 0:
        raise BadRequest("top_p must be above 0")
    return SampleRequest(
        session=fields.text("sampling_session_id", ""),
        number=fields.whole("seq_id", 0),
        tokens=_prompt(fields.table("prompt")),
        num_samples=fields.whole("num_samples", 1, least=1, most=MOST_SAMPLES),
        max_tokens=settings.whole("max_tokens", least=1, most=2**31 - 1) if settings.has("max_tokens") else None,
        temperature=settings.number("temperature", 1.0, most=100.0),
        seed=settings.whole("seed") if settings.has("seed") else None,
        decoding=decoding,
        prompt_logprobs=fields.flag("prompt_logprobs"),
        topk_prompt_logprobs=fields.whole("topk_prompt_logprobs", 0, most=64),
        path=fields.text("model_path", ""),
        base_model=fields.text("base_model", ""),
    )


def _prompt(fields: Fields) -> np.ndarray:
    tokens: list[int] = []
    for chunk in fields.items("chunks", most=1 << 16):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise BadRequest("the prompt has a part that is no text: this server reads text alone")
        tokens += Fields(chunk, "a chunk of the prompt").items("tokens", most=_MOST_TOKENS)
    if not tokens or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise BadRequest("a prompt needs tokens, each a whole number")
    return np.array(tokens, np.int64)


def _stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Texts and tokens that end an answer; None for tokens: the model's own."""
    if stop is None:
        return (), None
    stops: list[Any] = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 64:
        raise BadRequest("stop must be a text, or a list of at most 64 texts or tokens")
    texts = tuple(each for each in stops if isinstance(each, str) and 0 < len(each) <= 256)
    tokens = tuple(each for each in stops if type(each) is int and 0 <= each < 2**31)
    if len(stops) not in (len(texts), len(tokens)):
        raise BadRequest("stop must be a list of texts, or of tokens")
    return texts, tokens
