"""Backends that questions are asked of: a model's generators, and a judge's server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress

from titan_rl.controller.preflight.checks import Checked, tokenizer_of
from titan_rl.controller.wiring import Actors
from titan_rl.data.callbacks import Log
from titan_rl.data.seeds import named_seed
from titan_rl.data.text.messages import content_of
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.tokenizer import Tokenizer, read_answer
from titan_rl.data.text.turns import encode_messages
from titan_rl.data.types import Completion, Request
from titan_rl.diagnostics.principles.asking import Ask, Question, Reply
from titan_rl.environments.rewards.judge_server import JudgeServer, QuestionRefused, ReplyCut, ServerConfig
from titan_rl.environments.rollout.decoding import suite_decoding

_SERVER_PLACES, _ROUNDS_AHEAD = 16, 2
"""Questions to a server at once; and to engines, for each that they answer at once: none waits long."""
_SHORT = "Which is shorter, 1 or 11? Answer in one word."
"""Question that a judge's server has room for."""


def opened_when_asked(backend: AbstractAsyncContextManager[Ask], stack: AsyncExitStack) -> Ask:
    """A backend that the first question opens, and that ``stack`` closes: what is on record starts no engine."""
    opening, opened = asyncio.Lock(), list[Ask]()

    async def ask(question: Question) -> Reply:
        async with opening:
            if not opened:
                opened.append(await stack.enter_async_context(backend))
        return await opened[0](question)

    return ask


@asynccontextmanager
async def model_backend(checked: Checked, log: Log) -> AsyncIterator[Ask]:
    """Generators of a model, as long as the block lasts."""
    tokenizer, generator = await asyncio.to_thread(tokenizer_of, checked.config), checked.config.generator
    places = asyncio.Semaphore(_ROUNDS_AHEAD * generator.replicas * generator.max_num_seqs)
    async with Actors(checked, checked.config.model.path, frozenset({"generators"}), log=log) as actors:

        async def ask(question: Question) -> Reply:
            request = request_of(question, checked, tokenizer)
            if len(request.tokens) + request.max_new_tokens > actors.meshes.max_tokens:
                return Reply("", "too_long")
            async with places:
                [completion] = await actors.meshes.dispatcher.complete(request)
            return reply_of(completion, tokenizer)

        yield ask


def request_of(question: Question, checked: Checked, tokenizer: Tokenizer) -> Request:
    """Request of a question, whose text becomes no control token. Errors: ConfigError if the template refuses it."""
    [suite] = checked.suites
    own = with_options(tokenizer, question.template_options)
    return Request(
        encode_messages(own, list(question.messages), question.tools),
        [named_seed("reply", checked.config.run.seed, question.name)],
        suite.config.max_new_tokens,
        question.temperature,
        suite_decoding(suite.config, checked.config),
    )


def reply_of(completion: Completion, tokenizer: Tokenizer) -> Reply:
    ended = completion.stop_reason == "stop"
    text = read_answer(tokenizer, completion.tokens, ended=ended)
    return Reply(text, "cut" if completion.stop_reason == "length" else "ok")


@asynccontextmanager
async def server_backend(config: ServerConfig) -> AsyncIterator[Ask]:
    """Server of a judge, as long as the block lasts. Errors of a question: JudgeFailed."""
    server, places = JudgeServer(config), asyncio.Semaphore(_SERVER_PLACES)

    async def ask(question: Question) -> Reply:
        [only] = question.messages
        async with places:
            try:
                return Reply(await server.ask(content_of(only), str))
            except ReplyCut:
                return Reply("", "cut")
            except QuestionRefused:
                with suppress(ReplyCut):
                    await server.ask(_SHORT, str)  # a server that refuses this too refuses whatever it is asked
                return Reply("", "refused")

    try:
        yield ask
    finally:
        await server.close()
