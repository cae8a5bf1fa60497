"""What vLLM is told of a sample, and what it gives back, in this package's own types."""

from concurrent.futures import Future
from dataclasses import asdict, dataclass, field

import numpy as np
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import MultiModalInput
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from titan_rl.compat.vllm.vision import image_request
from titan_rl.data.images import ImageProcessor
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.data.storage.stored_images import check_images
from titan_rl.data.types import Completion, Decoding, PromptLogprobs, Request

EnginePrompt = TokensPrompt | MultiModalInput


@dataclass
class Pending:
    """One request with several samples, until the last of them is done."""

    id: str
    """By which it can be aborted; empty: not."""
    future: Future
    completions: list[Completion | None]
    left: int


@dataclass
class Sample:
    """One sample of a request, until it is done."""

    pending: Pending
    place: int
    engine_id: str
    """vLLM's own id of it."""
    masked_words: int
    """Words of the vocabulary, of which a sampling mask is given back; 0: none is."""
    decoding: Decoding
    records_routing: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(number of tokens generated before, policy version that generates the next ones), in order."""


def engine_prompt(request: Request, processor: ImageProcessor | None, salt: str) -> EnginePrompt:
    """A request's tokens and images, as vLLM takes them.

    ``salt``: of the weights, by which nothing is found that others have computed. Errors: ValueError for images that
    the model does not see, or that are not its tokens'."""
    if not request.images:
        return TokensPrompt(prompt_token_ids=request.tokens.tolist(), cache_salt=salt)
    check_images(request.tokens, request.images, processor)
    assert processor is not None, "checked"
    places = [(image.start, image.num_tokens) for image in request.images]
    names = [f"{salt}.{image.digest}" for image in request.images]
    return image_request(request.tokens.tolist(), *processor.patches(request.images), places, names, salt)


def sampling_parameters(request: Request, seed: int, stop_token_ids: list[int]) -> SamplingParams:
    """vLLM's sampling parameters of one sample. Errors: VLLMValidationError for a setting beyond its limits."""
    settings = asdict(request.decoding)
    stop, budget, stop_tokens = list(settings.pop("stop")), settings.pop("thinking_budget"), settings.pop("stop_tokens")
    return SamplingParams(
        **settings,
        stop=stop,
        thinking_token_budget=budget or None,
        include_stop_str_in_output=True,
        skip_special_tokens=not stop,  # such a text may be one
        detokenize=bool(stop),
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=seed,
        logprobs=0,
        prompt_logprobs=request.prompt_logprobs if seed == request.seeds[0] else None,
        flat_logprobs=True,
        stop_token_ids=stop_token_ids if stop_tokens is None else list(stop_tokens),
        ignore_eos=stop_tokens is not None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # these are one request's, and a deep copy costs a tenth of an engine's work for short answers
    )


def sampling_mask(result: CompletionOutput, num_words: int) -> SamplingMask | None:
    """Words that each token was sampled from. Errors: RuntimeError if vLLM does not say it of each."""
    if not num_words:
        return None
    supports = [] if result.sampling_mask is None else result.sampling_mask.token_ids
    if len(supports) != len(result.token_ids):
        raise RuntimeError(f"vLLM gave {len(supports)} sampling masks for {len(result.token_ids)} tokens")
    return SamplingMask.of([np.asarray(support) for support in supports], num_words)


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs | None:
    """None where the request does not ask for them."""
    if output.prompt_logprobs is None:
        return None
    assert isinstance(output.prompt_logprobs, FlatLogprobs) and output.prompt_token_ids is not None
    flat, count = output.prompt_logprobs, len(output.prompt_token_ids) - 1
    width = len(flat.token_ids) // count if count else 1
    tokens, logprobs = np.zeros((count + 1, width), np.int32), np.full((count + 1, width), np.nan, np.float32)
    tokens[1:] = np.asarray(flat.token_ids, np.int32).reshape(count, width)
    logprobs[1:] = np.asarray(flat.logprobs, np.float32).reshape(count, width)
    return PromptLogprobs(tokens, logprobs)
