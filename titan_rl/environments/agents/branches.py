"""Branches of an agent's episode, token in, token out.

A request says a whole conversation, as OpenAI's form has it. One that goes on from what was answered before extends the
very tokens of that answer; only what is new in it is tokenized. One that goes back (another try at an earlier answer)
becomes a branch with the same beginning, of which only what is sampled anew is trained. What nobody answered before (a
sub-agent, a history that was cut short) begins a branch of its own. No branch sees another.

    request ─▶ find_continuation(): tokens ─▶ the generator ─▶ add(): the branch is extended, or there is one more
"""

import itertools
from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.text.control_tokens import plain
from titan_rl.data.text.messages import Message, message
from titan_rl.data.text.tokenizer import Tokenizer, decoded, encode_behind
from titan_rl.data.text.turns import encode_messages, encode_reply
from titan_rl.data.types import Completion, Provenance
from titan_rl.environments.agents.openai_requests import ChatMessage, ModelRequest, Refused
from titan_rl.environments.conversation.episode import Episode


@dataclass
class Branch:
    """One conversation of an episode, with the history that its agent has."""

    episode: Episode
    session: str
    tools: tuple[str, ...]
    message_keys: list[tuple] = field(default_factory=list)
    """``comparison_key`` of each message; empty for tokens or plain text."""
    text: str = ""
    """Of plain text, all of it."""
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    """After each answer: the number of messages, of characters and of tokens."""
    last: int = 0
    """The number of its latest answer in the episode."""


@dataclass(frozen=True)
class Continuation:
    """Place of a request: behind ``num_answers`` of a branch, or in a new one."""

    branch: Branch | None
    num_answers: int
    tokens: np.ndarray
    """Of the reply to them; of all, if it is a new branch."""
    provenance: np.ndarray
    messages: list[Message]
    """The reply, for people."""

    @property
    def prompt(self) -> np.ndarray:
        """Prompt tokens [T] of the next answer, int32."""
        if self.branch is None:
            return self.tokens
        return np.concatenate([self.branch.episode.tokens[: self.branch.ends[self.num_answers - 1][2]], self.tokens])


class Branches:
    """Owner of an episode's branches: finds the one that a request extends, or begins another."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._branches: list[Branch] = []
        self._numbers = itertools.count(1)

    def find_continuation(self, request: ModelRequest) -> Continuation:
        """Longest branch with the request's history, and the tokens of the rest.

        Errors: Refused for messages that the model's chat template cannot write.
        """
        continuation = self._find_chat(request) if request.is_chat else self._find_text(request)
        return continuation or Continuation(None, 0, *self._encode_start(request), [])

    def _places(self, session: str) -> list[tuple[Branch, int]]:
        """Where a session's branches may be gone on from, the longest first: behind each answer."""
        branches = [branch for branch in self._branches if branch.session == session]
        places = [(branch, place) for branch in branches for place in range(1, len(branch.ends) + 1)]
        return sorted(places, key=lambda at: at[0].ends[at[1] - 1][2], reverse=True)

    def _find_chat(self, request: ModelRequest) -> Continuation | None:
        compared = [message.comparison_key for message in request.messages]
        for branch, place in self._places(request.session):
            history = branch.message_keys[: branch.ends[place - 1][0]]
            reply = request.messages[len(history) :]
            is_reply = len({message.role for message in reply}) == 1 and reply[0].role in ("tool", "user")
            if not history or branch.tools != request.tools or compared[: len(history)] != history or not is_reply:
                continue
            messages: list[Message] = [message(each.role, each.content) for each in reply]
            last = int(branch.episode.tokens[branch.ends[place - 1][2] - 1])
            try:
                tokens, provenance = encode_reply(self.tokenizer, messages, last, is_chat=True, tools=request.schemas)
            except ConfigError:  # the template has no such replies one after the other: it may know them in a whole
                continue
            return Continuation(branch, place, tokens, provenance, messages)
        return None

    def _find_text(self, request: ModelRequest) -> Continuation | None:
        for branch, place in self._places(request.session):
            if (suffix := self._suffix(request.prompt, branch, place)) is None:
                continue
            messages: list[Message] = [message("user", decoded(self.tokenizer, suffix))]
            return Continuation(branch, place, suffix, np.full(len(suffix), Provenance.TOOL, np.int8), messages)
        return None

    def _suffix(self, prompt: str | tuple[int, ...], branch: Branch, place: int) -> np.ndarray | None:
        """What the prompt has behind a branch's answer; None if it does not begin so."""
        _, num_characters, num_tokens = branch.ends[place - 1]
        if isinstance(prompt, str):
            text = branch.text[:num_characters]
            if not text or not prompt.startswith(text):
                return None
            suffix = prompt[len(text) :]
            is_repeated = not suffix and not branch.episode.answers[place - 1]  # an empty answer did not do
            return None if is_repeated else self._encode_suffix(text, suffix)
        is_same = branch.episode.tokens[:num_tokens].tolist() == list(prompt[:num_tokens])
        return np.asarray(prompt[num_tokens:], np.int32) if is_same else None

    def _encode_suffix(self, text: str, suffix: str) -> np.ndarray:
        """As it is: a program that writes plain text may write the template's words itself."""
        return np.asarray(encode_behind(self.tokenizer, text, suffix), np.int32)

    def _encode_start(self, request: ModelRequest) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and provenance of a conversation from its beginning. Errors: Refused."""
        if not request.is_chat:
            prompt = request.prompt
            encoded = encode_messages(self.tokenizer, prompt, is_plain=True) if isinstance(prompt, str) else prompt
            tokens = np.asarray(encoded, np.int32)
        else:
            messages = [message(each.role, self._escape_calls(each)) for each in request.messages]
            try:
                tokens = encode_messages(self.tokenizer, messages, request.schemas, is_plain=True)
            except ConfigError as error:
                raise Refused(str(error)) from None
        return tokens, np.full(len(tokens), Provenance.TEMPLATE, np.int8)

    def _escape_calls(self, message: ChatMessage) -> str:
        """Calls are written with the template's own words; whatever else a message says is text."""

        def escaped(text: str) -> str:
            return plain(self.tokenizer, text, message.role)

        calls = tuple((escaped(name), escaped(arguments)) for name, arguments in message.calls)
        return ChatMessage(message.role, escaped(message.content), calls).text

    def add(
        self, request: ModelRequest, to: Continuation, completion: Completion, text: str, answer: ChatMessage
    ) -> None:
        """Add a completion to its branch. ``text``: all of it, decoded; ``answer``: the message for the agent."""
        branch = self._branch_of(request, to)
        branch.episode.add_completion(completion, text)
        branch.message_keys = (
            [*(message.comparison_key for message in request.messages), answer.comparison_key]
            if request.is_chat
            else []
        )
        branch.text = request.prompt + text if isinstance(request.prompt, str) and not request.is_chat else ""
        branch.ends.append((len(branch.message_keys), len(branch.text), len(branch.episode.tokens)))
        branch.last = next(self._numbers)

    def _branch_of(self, request: ModelRequest, to: Continuation) -> Branch:
        """The branch that was gone on from, if nobody was quicker; else one more."""
        if to.branch is not None and to.num_answers == len(to.branch.ends):
            to.branch.episode.add_reply(to.messages, to.tokens, to.provenance)
            return to.branch
        episode = Episode(to.tokens) if to.branch is None else to.branch.episode.fork(to.num_answers)
        if to.branch is not None:
            episode.add_reply(to.messages, to.tokens, to.provenance)
        self._branches.append(Branch(episode, request.session, request.tools))
        return self._branches[-1]

    def join(self, seat: str = "", left_out: Container[str] = ()) -> Episode | None:
        """Join branches of a seat, or of all sessions but ``left_out``, into one rollout; the latest is last.

        None without a branch.
        """
        kept = [b for b in self._branches if (b.session == seat if seat else b.session not in left_out)]
        if not kept:
            return None
        first, *later = sorted(kept, key=lambda branch: branch.last)
        for branch in later:
            first.episode.join(branch.episode)
        return first.episode
