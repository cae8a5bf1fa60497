"""The vocabulary that crosses rooms, from a prompt to a packed batch. No torch here: these travel in messages.

Dimensions: T tokens of one rollout or one packed row, S trained tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from titan_rl.data.fast_pickle import FastPickle
from titan_rl.data.images import PlacedImage, question_key
from titan_rl.data.spans import Span
from titan_rl.data.storage.decoding import Decoding, PenalizedSample, Penalties
from titan_rl.data.storage.sampling_mask import SamplingMask

OUTCOME_COLUMNS = ("outcome_S", "outcome_weight_S")
"""Of each trained token, float32: the outcome of its sample, and its weight in a mean over all samples of a batch."""
TASK_COLUMN = "task_S"
"""Of each trained token, int64: the number of its sample's task among a mixture's."""

Cutoff = Literal["truncated", "max_turns"]
"""Limit that ended a rollout: ``truncated`` ran out of tokens, ``max_turns`` of turns."""

Status = Literal["ok", Cutoff, "timeout", "infra_error", "unasked"]
"""How a rollout ended: ``timeout`` ran out of seconds; it and ``infra_error`` never reach the loss, nor does the
``unasked`` one of a seat whose turn never came."""

SCORED = ("ok", *get_args(Cutoff))
"""Statuses of rollouts with a reward."""


def correct(reward: float) -> bool:
    """Whether a reward counts as a right answer in accuracies and pass rates."""
    return reward >= 1.0 - 1e-9


class Provenance(IntEnum):
    """Writer of a token."""

    TEMPLATE = 0
    MODEL = 1
    TOOL = 2
    REPEATED = 3
    """An answer in an earlier branch of the same rollout, where it is trained."""
    FORCED = 4
    """The budget for thinking, which closed a section inside an answer."""


_MODEL = int(Provenance.MODEL)  # numpy compares with a member three times as slowly


def is_model(provenance: np.ndarray) -> np.ndarray:
    """Mask of the tokens that the model wrote, here."""
    return provenance == _MODEL


def num_model_tokens(provenance: np.ndarray) -> int:
    """Number of tokens by the model."""
    return int(np.count_nonzero(is_model(provenance)))


@dataclass(frozen=True)
class Prompt:
    """Question of a task."""

    id: str
    """Unique in a run: the stream and the place in it, e.g. ``train/0000012``."""
    text: str
    answer: str
    """The expected answer. It stays with the verifier: no generator and no sandbox ever sees it."""
    entry: dict
    """What the task's scorer needs besides."""
    task: str = ""
    """Of several in one run, the name of the one that it is of."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Its own options for the chat template, over the run's."""
    images: Sequence[bytes] = field(default_factory=list)
    """What it shows, encoded (data/images.py)."""

    @property
    def question_key(self) -> str:
        """What tells it from other questions: its text and images."""
        return question_key(self.text, self.images)


CallStatus = Literal["ok", "error", "timeout"]
"""What came of a tool call; ``error``: by the model's own fault, which it was told."""


@dataclass(frozen=True)
class ToolCall:
    """A tool that an answer called."""

    name: str
    """Empty: the call could not be read."""
    arguments: str
    """As JSON, cut where it is long."""
    status: CallStatus
    seconds: float


@dataclass(frozen=True)
class Turn:
    """Answer of the model inside a rollout: tokens [start, stop)."""

    start: int
    stop: int
    stop_reason: str
    calls: tuple[ToolCall, ...] = ()
    """What it called."""


class RequestRefused(ValueError):
    """A generator cannot take a request, such as one with tokens that its model does not have; it goes on."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, each given those before it."""

    tokens: np.ndarray
    """int32 [T, 1 + K]: the prompt's own token, and behind it the K likeliest ones; row 0 holds zeros."""
    logprobs: np.ndarray
    """float32 [T, 1 + K]; row 0, which nothing comes before, holds NaN."""


@dataclass(frozen=True)
class Completion(FastPickle):
    """Answer of a generator to one seed of a request."""

    tokens: np.ndarray
    """int32 [T], end of sequence included."""
    logprobs: np.ndarray
    """float32 [T]: log-probability of each token under the distribution that it was drawn from."""
    versions: np.ndarray
    """int32 [T]: policy version that made each token."""
    stop_reason: str
    """``stop``: an end token; ``stop_string``: a text of ``Decoding.stop``; ``length``: it was cut short."""
    mask: SamplingMask | None = None
    """Of each token, the ones that it was sampled from; None: from the whole vocabulary."""
    penalties: Penalties | None = None
    """Of the logits that it was sampled from; None: there were none."""
    forced: np.ndarray | None = None
    """Bool [T]: whether a token was forced, and not sampled; None: none was."""
    routed_experts: np.ndarray | None = None
    """[P + T - 1, layers, experts] of the request's P tokens and these but the last; None: not asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """Where the request asks for them, of its first completion."""


@dataclass
class Rollout:
    """Sample of a prompt: every token with its provenance, its sampling logprob and its policy version."""

    prompt_id: str
    sample: int
    tokens: np.ndarray
    provenance: np.ndarray
    """int8 [T]"""
    logprobs: np.ndarray
    """float32 [T]; 0 where the model did not write the token, or not here."""
    versions: np.ndarray
    """int32 [T]; -1 there."""
    turns: list[Turn]
    status: Status
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] = field(default_factory=list)
    """Of each answer, where the task gives such; part of ``reward``, whose rest is the last answer's."""
    advantage: float | None = None
    """Of all tokens that the model wrote, as a loop of one's own has it, of all trained samples of a group; none: the
    algorithm's."""
    task_reward: float | None = None
    """What the task itself gives, where ``reward`` is a reward model's."""
    text: str = ""
    """What was said, for people: the model's answers, and between them each reply behind ``> ``."""
    failure: str = ""
    """What went wrong, where something did; not recorded."""
    grade: float | None = None
    """By ``eval.grader``, or by the task where a reward model rewards: what nothing is trained on."""
    branches: list[int] = field(default_factory=list)
    """Where each begins, if the tokens are those of several conversations, one behind the other, which do not see each
    other: of an agent that asked the model for more than one (environments/agents/branches.py)."""
    seat: str = ""
    """Whose it is, where several play one episode: it is compared with those of its own seat."""
    mask: SamplingMask | None = None
    """Of each of the T tokens, the ones that it was sampled from; None: from the whole vocabulary."""
    penalties: Penalties | None = None
    """As its completions'."""
    routed_experts: np.ndarray | None = None
    """[T, layers, experts] that each token went through when it was sampled; None: not recorded."""
    reprompt: np.ndarray | None = None
    """int32: its prompt as a self-teacher reads it, with another sample's right answer; None: there is none."""
    images: Sequence[PlacedImage] = ()
    """Of its prompt, in the order of its tokens."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Tokens [start, stop) of each branch."""
        return list(pairwise([*(self.branches or [0]), len(self.tokens)]))

    @property
    def is_scored(self) -> bool:
        return self.status in SCORED

    @property
    def true_reward(self) -> float:
        """Reward that decides whether the answer is right."""
        return self.reward if self.task_reward is None else self.task_reward

    @property
    def outcome(self) -> float:
        """Verified outcome of the answer, from 0 to 1: the true reward, clipped."""
        return min(max(self.true_reward, 0.0), 1.0)

    @property
    def num_model_tokens(self) -> int:
        return num_model_tokens(self.provenance)


@dataclass
class Group(FastPickle):
    """The samples of one prompt."""

    prompt_id: str
    rollouts: list[Rollout]
    refused: str = ""
    """Why there are no rollouts, if there are none."""
    replica_failure: str = ""
    """What went wrong at the generator, if that is why."""
    question: str = ""
    """The prompt's text and the expected answer, for people who read what was sampled."""
    expected: str = ""
    task: str = ""
    """As the prompt has it."""
    place: str = ""
    """The prompt's row in a data file (``questions.jsonl line 7``), if it is of one."""
    is_request_refused: bool = False
    """Whether that is all: the generator cannot take this request, and goes on."""
    seconds_generate: float = 0.0
    """From the first request to the last answer."""
    seconds_score: float = 0.0
    begun: float = 0.0
    """When its first request was made, in Unix seconds; 0 where that is not known."""
    verifier: str = ""
    """The name of the one that drove it."""
    score_retries: int = 0
    """Times that its prompt was sampled again, since a sample could not be scored."""


@dataclass(frozen=True)
class Sample:
    """Packer's input: a rollout, or one of its branches."""

    tokens: np.ndarray
    provenance: np.ndarray
    logprobs: np.ndarray
    advantage: float | np.ndarray
    """Of all tokens that the model wrote, or [num_model_tokens] of each."""
    prompt_id: str = ""
    sample: int = 0
    outcome: float | None = None
    """What was verified of it, from 0 to 1, where a model is to learn that."""
    branch: int = 0
    """Of a rollout's several conversations, which: one above 0 is of the same rollout as the sample before it."""
    mask: SamplingMask | None = None
    """As the rollout's, and so the next."""
    penalties: Penalties | None = None
    starts: tuple[int, ...] = ()
    """Of its answers, where there are penalties: each follows from what the answer has so far."""
    routed_experts: np.ndarray | None = None
    """As the rollout's, and so the next."""
    reprompt: np.ndarray | None = None
    task: int = -1
    """Number of its task among a mixture's; -1: nobody asks."""
    teacher: int = 0
    """Number of the teacher of its task: those of different teachers share no row."""
    images: Sequence[PlacedImage] = ()
    """As the rollout's."""


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of a packed row, which see themselves and their prefix."""

    start: int
    length: int
    prefix: tuple[tuple[int, int], ...] = ()
    """What comes before them, in order: (start, length) of each segment that they share with others."""

    @property
    def prefix_length(self) -> int:
        return sum(length for _, length in self.prefix)


@dataclass(frozen=True)
class Row:
    """Packed row. Trained token s was predicted at position ``source_S[s]`` of the row."""

    tokens_T: np.ndarray
    positions_T: np.ndarray
    """int64 [T], or [T, 3] beside images: of time, row and column."""
    segments: list[Segment]
    source_S: np.ndarray
    target_S: np.ndarray
    logprob_S: np.ndarray
    """Sampling log-probability of each trained token."""
    advantage_S: np.ndarray
    weight_S: np.ndarray
    """Weight of each trained token in the loss; the loss is a plain sum over all rows of all ranks."""
    owners: list[tuple[str, int, int]] = field(default_factory=list)
    """(prompt, sample, number of its trained tokens) of each branch in the order of the tokens: who to name if one is
    at fault. Those of a rollout's branches stand together."""
    rollouts: list[tuple[int, int]] = field(default_factory=list)
    """Of each owner, the number of its rollout in the batch and of the branch in it; empty: each is one by itself."""
    split: frozenset[int] = frozenset()
    """Numbers of rollouts of which other rows of the batch hold branches, too."""
    mask: SamplingMask | None = None
    """Of each of the S trained tokens, the ones that it was sampled from; None: from the whole vocabulary."""
    penalized: list[PenalizedSample | None] = field(default_factory=list)
    """Of each owner, what the penalties of its tokens follow from; None: there are none. Empty: nowhere."""
    routed_experts: np.ndarray | None = None
    """[T, layers, experts] that the policy takes for each token of the row; None: its own choice."""
    reprompts: list[np.ndarray | None] = field(default_factory=list)
    """Of each owner, its prompt as a self-teacher reads it; None: there is none. Empty: nowhere."""
    images: Sequence[PlacedImage] = ()
    """What its tokens show, placed in the row."""
    role_columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Float32 [S] or [S, K] each: what model roles say of each trained token, by the names of
    algorithms.base.LossInputs; int64 [S, K], which words it is that a teacher spoke of; and from the beginning
    ``OUTCOME_COLUMNS``, of samples that have an outcome, and ``TASK_COLUMN``, of a mixture's that have a teacher."""

    @property
    def branch_offsets(self) -> np.ndarray:
        """int64: of each owner the trained tokens [branch_offsets[b], branch_offsets[b + 1])."""
        counts = [count for _, _, count in self.owners] or [len(self.target_S)]
        return np.cumsum([0, *counts], dtype=np.int64)

    @property
    def offsets_N(self) -> np.ndarray:
        """int64 [N + 1]: rollout n has here, of all branches, the trained tokens [offsets_N[n], offsets_N[n + 1])."""
        return self.branch_offsets[[*self._firsts, -1]]

    @property
    def samples(self) -> list[tuple[str, int]]:
        """(prompt, sample) of each rollout."""
        return [self.owners[place][:2] for place in self._firsts] if self.owners else []

    @property
    def are_whole(self) -> list[bool]:
        """Whether all branches of each rollout are here."""
        return [not self.rollouts or self.rollouts[place][0] not in self.split for place in self._firsts]

    @property
    def _firsts(self) -> list[int]:
        """Of each rollout, the place of its first branch among the owners."""
        numbers = [number for number, _ in self.rollouts] or range(max(len(self.owners), 1))
        return [0, *(place for place, (one, other) in enumerate(pairwise(numbers), 1) if one != other)]


@dataclass(frozen=True)
class Layout:
    """The shape in which the trainer takes a batch."""

    num_ranks: int
    """Groups of ranks that take rows of their own."""
    row_tokens: int
    """Longest row."""
    row_multiple: int = 1
    """The number of a group's rows is a multiple of it."""


@dataclass(frozen=True)
class Batch:
    """Rows for each data-parallel rank, the same number for every rank."""

    rows: list[list[Row]]
    num_tokens: int
    """Tokens that go through the model."""
    num_trained_tokens: int
    has_signal: bool
    """Whether any advantage differs from 0."""


@dataclass
class StepMetrics:
    """Metrics of one optimizer step; means are over the batch's trained tokens, all ranks together."""

    loss: float = 0.0
    grad_norm: float = 0.0
    entropy: float = 0.0
    agreement_mean: float = 1.0
    """Mean of exp|trainer logprob - sampling logprob|, before the step's updates moved the policy."""
    agreement_max: float = 1.0
    kl_k3: float = 0.0
    """Mean of r - 1 - log r, r the ratio of trainer to sampler: Schulman's k3 estimate of KL(sampler, trainer)."""
    loss_metrics: dict[str, float] = field(default_factory=dict)
    """What the algorithm's loss counts beside itself, by its own names."""
    num_trained_tokens: int = 0
    learning_rate: float = 0.0
    seconds_forward_backward: float = 0.0
    seconds_optimizer: float = 0.0


@dataclass
class EngineStatistics:
    """Statistics of an engine under one version of the weights."""

    seconds_busy: float = 0.0
    num_tokens: int = 0
    """Generated ones."""
    num_prompt_tokens: int = 0
    """Of the samples that ended; the turns before are part of a turn's prompt."""
    num_cached_tokens: int = 0
    """Of these, whose keys and values were there already: from other samples of the prompt, or from the turn before."""
    num_drafted: int = 0
    """Tokens that were drafted and checked."""
    num_accepted: int = 0
    """Of these, that became tokens of an answer."""
    num_steps: int = 0
    num_running: int = 0
    """Requests that ran, summed over steps."""
    num_preemptions: int = 0
    """Requests whose keys and values were dropped for want of room, to be computed again."""
    kv_cache_usage_max: float = 0.0
    """Largest share of the KV cache that was held."""
    generator: int = 0
    """The replica's number."""
    seconds_update: float = 0.0
    """How long generation stood still for the update that ended the version."""
    bytes_from_trainers: int = 0
    """Of the weights of the update, what came over TCP from trainers' hosts."""
    bytes_from_generators: int = 0
    """And from other generators' hosts."""
    spans: list[Span] = field(default_factory=list)
    """When it generated, and took the version that came next."""

    def add(self, num_tokens: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A sample has ended."""
        self.num_tokens += num_tokens
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def plus(self, later: "EngineStatistics") -> "EngineStatistics":
        """Statistics of both times together."""
        sums = {field.name: getattr(self, field.name) + getattr(later, field.name) for field in fields(self)}
        usage = max(self.kv_cache_usage_max, later.kv_cache_usage_max)
        return EngineStatistics(**sums | {"generator": self.generator, "kv_cache_usage_max": usage})


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a group."""

    num_samples: int
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    max_tokens: int
    """Longest rollout, prompt included."""
    max_turns: int = 32
    """Answers of a rollout."""
    decoding: Decoding = Decoding()
    routed_experts: bool = False
    """Whether the experts that tokens went through are recorded."""
    reprompt_template: str = ""
    """What a self-teacher reads (algorithms/policy_gradient/teachers/sdpo.py); empty: there is none."""


@dataclass(frozen=True)
class Request:
    """Request to a generator: one completion of the same tokens for each seed."""

    tokens: np.ndarray
    seeds: list[int]
    max_new_tokens: int
    temperature: float
    decoding: Decoding = Decoding()
    prompt_logprobs: int | None = None
    """Also the prompt's own log-probabilities, with so many of the likeliest tokens; None: not."""
    routed_experts: bool = False
    """Also the experts that each token went through, of an engine that records them."""
    images: Sequence[PlacedImage] = ()
    """What its tokens show."""
    id: str = ""
    """By which it can be aborted; empty: not."""

    def check(self, vocabulary: int) -> None:
        """Check of a request's tokens.

        Errors: RequestRefused for tokens that an engine would look up and die of: vLLM without a tokenizer does not
        check them.
        """
        if not len(self.tokens) or not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < vocabulary:
            raise RequestRefused(f"a prompt needs tokens, each in the model's vocabulary of {vocabulary}")
