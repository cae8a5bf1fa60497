"""Episodes of agents: an agent's requests and the model's answers become a rollout."""

import asyncio
import contextvars
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import source_file, what_happened
from titan_rl.data.text.tokenizer import decoded
from titan_rl.data.types import Completion, Cutoff, Request, Status
from titan_rl.environments.agents.branches import Branches, Continuation
from titan_rl.environments.agents.endpoint import Endpoint
from titan_rl.environments.agents.openai_requests import ModelRequest, Refused, check_decoding, response_message
from titan_rl.environments.agents.openai_responses import ModelResponse
from titan_rl.environments.conversation.episode import Episode, Player
from titan_rl.environments.interfaces.agent import Agent, HasKey, ModelAccess, Outcome, check_agent
from titan_rl.environments.interfaces.environment import EnvironmentFailed, Reply

Failure = tuple[Status, str]
_END_SECONDS = 5.0
"""For a cancelled agent."""


class AgentTookTooLong(Exception):
    """Timeout of an agent."""


async def play_agent(player: Player, endpoint: Endpoint, number: int, prompt_tokens: np.ndarray) -> list[Episode]:
    """Play one agent episode: a rollout for each of the task's seats, or one. ``number``: the episode's.

    Errors: what asking the generator raises; whatever else fails is the episode's.
    """
    requests, outcome, failure = _EpisodeRequests(player, number), Outcome(), None
    try:
        async with player.task.sessions or nullcontext():
            agent = check_agent(player.task.agent(player.prompt))
            with endpoint.open(requests.answer, agent.api_key if isinstance(agent, HasKey) else None) as model:
                outcome = await requests.run_agent(agent, model)
    except AgentTookTooLong as error:
        failure = "timeout", str(error)
    except (ConfigError, EnvironmentFailed) as error:
        failure = "infra_error", str(error)
    return [requests.episode(seat, outcome, failure, prompt_tokens) for seat in requests.seats or ("",)]


def _run_message(agent: Agent, text: str) -> str:
    return f"{type(agent).__name__}.run {text}"


class _EpisodeRequests:
    """One episode's requests."""

    def __init__(self, player: Player, sample: int):
        self.player, self.sample = player, sample
        self.branches = Branches(player.tokenizer)
        self.seats: Sequence[str] = player.task.seats
        self.cutoff: Cutoff | None = None
        """Limit that a request met."""
        self._num_requests = 0
        self._is_over = False
        self._generator_error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = contextvars.copy_context()
        """The episode's own: a request comes in that of the server."""

    async def run_agent(self, agent: Agent, model: ModelAccess) -> Outcome:
        """Run the agent to its end.

        Errors: AgentTookTooLong; EnvironmentFailed, ConfigError; what asking the generator raises.
        """
        running = asyncio.create_task(agent.run(model))
        try:
            tasks = {running, self._generator_error}
            await asyncio.wait(tasks, timeout=agent.timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._generator_error.done():
                self._generator_error.result()
            if not running.done():
                raise AgentTookTooLong(_run_message(agent, f"did not end within {agent.timeout:g} s"))
            return self._outcome_of(agent, running)
        finally:
            self._is_over = True
            running.cancel()
            await asyncio.wait({running}, timeout=_END_SECONDS)
            if self._generator_error.done():
                self._generator_error.exception()  # it was raised already, or comes too late to matter

    def _outcome_of(self, agent: Agent, running: asyncio.Task) -> Outcome:
        """Errors: EnvironmentFailed, ConfigError."""
        try:
            returned = running.result()
        except (ConfigError, EnvironmentFailed):
            raise
        except Exception as error:  # user code: whatever it raises is reported by name
            if self.cutoff and self._num_requests:
                return Outcome(0.0)
            raise EnvironmentFailed(
                _run_message(agent, f"failed: {what_happened(error, source_file(agent))}")
            ) from error
        outcome = returned if isinstance(returned, Outcome) else Outcome(returned)
        try:
            outcome.check()
        except ValueError as error:
            raise EnvironmentFailed(_run_message(agent, f"gave {error}")) from None
        return outcome

    def episode(self, seat: str, outcome: Outcome, failure: Failure | None, prompt_tokens: np.ndarray) -> Episode:
        """Episode of a seat, or of all sessions that are trained."""
        episode = self.branches.join(seat, outcome.left_out)
        if episode is None:
            unasked: Failure = ("unasked", "") if seat else ("infra_error", "the agent asked the model nothing")
            episode, failure = Episode(prompt_tokens), failure or unasked
        episode.seat, episode.failure, episode.cutoff = seat, failure, self.cutoff
        reward = outcome.rewards.get(seat, outcome.reward)
        if reward is not None and failure is None:
            episode.record_reply(Reply(reward=reward))
        return episode

    async def answer(self, request: ModelRequest) -> ModelResponse:
        """Sample an answer to an agent's request. Errors: Refused."""
        if self.seats and request.session not in self.seats:
            raise Refused(f"X-Session-ID = {request.session!r:.50}: give a seat: one of {', '.join(self.seats)}")
        check_decoding(request, self.player.sampling.decoding)
        to = self.branches.find_continuation(request)
        prompt = to.prompt
        self._check_room(len(prompt))
        self._num_requests += 1
        sampling = self.player.request(prompt, [self.sample], self._num_requests - 1, request.max_new_tokens)
        [completion] = await asyncio.create_task(self._ask(sampling), context=self._context)
        if self._is_over:
            raise Refused("the episode is over", "over", 410)
        return self._respond(request, to, prompt, completion)

    def _check_room(self, length: int) -> None:
        """Errors: Refused."""
        sampling = self.player.sampling
        if not length:
            raise Refused("there is nothing to go on from")
        if length >= sampling.max_tokens:
            self.cutoff = "truncated"
            raise Refused(
                f"This model's maximum context length is {sampling.max_tokens} tokens, and the request has "
                f"{length} without an answer.",
                "context_length_exceeded",
            )
        if self._num_requests >= sampling.max_turns:
            self.cutoff = "max_turns"
            raise Refused(f"an episode has at most rollout.max_turns = {sampling.max_turns} answers", "max_turns")

    async def _ask(self, request: Request) -> list[Completion]:
        """Errors: Refused, with the error kept for the episode."""
        try:
            return await self.player.ask(request)
        except Exception as error:
            if not self._generator_error.done():
                self._generator_error.set_exception(error)
            raise Refused("the generator could not answer", "unavailable", 503) from error

    def _respond(
        self, request: ModelRequest, to: Continuation, prompt: np.ndarray, completion: Completion
    ) -> ModelResponse:
        text = self.player.read(completion)
        message = response_message(text, request)
        self.branches.add(request, to, completion, text, message)
        pieces = [decoded(self.player.tokenizer, [token]) for token in completion.tokens.tolist()]
        return ModelResponse(request, prompt, completion, message, pieces)
