"""The conversations of an agent's episode, token in, token out.

A request says a whole conversation, as OpenAI's form has it. One that goes on from what was answered before extends the
very tokens of that answer; only what is new in it is tokenized. One that goes back (another try at an earlier answer)
becomes a branch with the same beginning, of which only what is sampled anew is trained. What nobody answered before (a
sub-agent, a history that was cut short) begins a branch of its own. No branch sees another.

    request ─▶ continued(): tokens ─▶ the generator ─▶ add(): the branch is extended, or there is one more
"""

import itertools
from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_fields import Message
from titan_rl.data.text.control_tokens import plain
from titan_rl.data.text.pieces import encode_behind
from titan_rl.data.text.tokenizer import Tokenizer, decoded
from titan_rl.data.text.turns import encode_messages, encode_reply
from titan_rl.data.types import Completion, Provenance
from titan_rl.environments.agents.openai_requests import Asked, Refused, Said
from titan_rl.environments.conversation.episode import Episode


@dataclass
class Branch:
    """One conversation, and what the agent knows of it."""

    episode: Episode
    session: str
    tools: tuple[str, ...]
    said: list[tuple] = field(default_factory=list)
    """As they are compared; of tokens or plain text none."""
    text: str = ""
    """Of plain text, all of it."""
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    """After each answer: the number of messages, of characters and of tokens."""
    last: int = 0
    """The number of its latest answer in the episode."""


@dataclass(frozen=True)
class Continued:
    """Where a request goes on: behind ``num_answers`` of a branch, if there is one."""

    branch: Branch | None
    num_answers: int
    tokens: np.ndarray
    """Of the reply to them; of all, if it is a new branch."""
    provenance: np.ndarray
    messages: list[Message]
    """The reply, for people."""

    @property
    def prompt(self) -> np.ndarray:
        """All tokens up to where the model goes on."""
        if self.branch is None:
            return self.tokens
        return np.concatenate([self.branch.episode.tokens[: self.branch.ends[self.num_answers - 1][2]], self.tokens])


class Branches:
    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._branches: list[Branch] = []
        self._numbers = itertools.count(1)

    def continued(self, asked: Asked) -> Continued:
        """Errors: Refused for messages that the model's chat template cannot write."""
        found = self._continued_chat(asked) if asked.is_chat else self._continued_text(asked)
        return found or Continued(None, 0, *self._begun(asked), [])

    def _places(self, session: str) -> list[tuple[Branch, int]]:
        """Where a session's branches may be gone on from, the longest first: behind each answer."""
        branches = [branch for branch in self._branches if branch.session == session]
        places = [(branch, place) for branch in branches for place in range(1, len(branch.ends) + 1)]
        return sorted(places, key=lambda at: at[0].ends[at[1] - 1][2], reverse=True)

    def _continued_chat(self, asked: Asked) -> Continued | None:
        compared = [message.compared for message in asked.messages]
        for branch, place in self._places(asked.session):
            known = branch.said[: branch.ends[place - 1][0]]
            reply = asked.messages[len(known) :]
            is_reply = len({message.role for message in reply}) == 1 and reply[0].role in ("tool", "user")
            if not known or branch.tools != asked.tools or compared[: len(known)] != known or not is_reply:
                continue
            messages: list[Message] = [dict(role=message.role, content=message.content) for message in reply]
            last = int(branch.episode.tokens[branch.ends[place - 1][2] - 1])
            try:
                tokens, provenance = encode_reply(self.tokenizer, messages, last, is_chat=True, tools=asked.schemas)
            except ConfigError:  # the template has no such replies one after the other: it may know them in a whole
                continue
            return Continued(branch, place, tokens, provenance, messages)
        return None

    def _continued_text(self, asked: Asked) -> Continued | None:
        for branch, place in self._places(asked.session):
            if (new := self._new(asked.prompt, branch, place)) is None:
                continue
            messages: list[Message] = [dict(role="user", content=decoded(self.tokenizer, new))]
            return Continued(branch, place, new, np.full(len(new), Provenance.TOOL, np.int8), messages)
        return None

    def _new(self, prompt: str | tuple[int, ...], branch: Branch, place: int) -> np.ndarray | None:
        """What the prompt has behind a branch's answer; None if it does not begin so."""
        _, num_characters, num_tokens = branch.ends[place - 1]
        if isinstance(prompt, str):
            text = branch.text[:num_characters]
            if not text or not prompt.startswith(text):
                return None
            new = prompt[len(text) :]
            is_asked_again = not new and not branch.episode.answers[place - 1]  # an empty answer did not do
            return None if is_asked_again else self._behind(text, new)
        is_same = branch.episode.tokens[:num_tokens].tolist() == list(prompt[:num_tokens])
        return np.asarray(prompt[num_tokens:], np.int32) if is_same else None

    def _behind(self, text: str, new: str) -> np.ndarray:
        """As it is: a program that writes plain text may write the template's words itself."""
        return np.asarray(encode_behind(self.tokenizer, text, new), np.int32)

    def _begun(self, asked: Asked) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and provenance of a conversation from its beginning. Errors: Refused."""
        if not asked.is_chat:
            prompt = asked.prompt
            encoded = encode_messages(self.tokenizer, prompt, is_plain=True) if isinstance(prompt, str) else prompt
            tokens = np.asarray(encoded, np.int32)
        else:
            messages = [dict(role=said.role, content=self._harmless(said)) for said in asked.messages]
            try:
                tokens = encode_messages(self.tokenizer, messages, asked.schemas, is_plain=True)
            except ConfigError as error:
                raise Refused(str(error)) from None
        return tokens, np.full(len(tokens), Provenance.TEMPLATE, np.int8)

    def _harmless(self, said: Said) -> str:
        """Calls are written with the template's own words; whatever else a message says is text."""

        def harmless(text: str) -> str:
            return plain(self.tokenizer, text, said.role)

        calls = tuple((harmless(name), harmless(arguments)) for name, arguments in said.calls)
        return Said(said.role, harmless(said.content), calls).text

    def add(self, asked: Asked, to: Continued, completion: Completion, text: str, answer: Said) -> None:
        """``text``: the whole of what the model wrote; ``answer``: what the agent is told of it."""
        branch = self._branch_of(asked, to)
        branch.episode.add_completion(completion, text)
        branch.said = [*(message.compared for message in asked.messages), answer.compared] if asked.is_chat else []
        branch.text = asked.prompt + text if isinstance(asked.prompt, str) and not asked.is_chat else ""
        branch.ends.append((len(branch.said), len(branch.text), len(branch.episode.tokens)))
        branch.last = next(self._numbers)

    def _branch_of(self, asked: Asked, to: Continued) -> Branch:
        """The branch that was gone on from, if nobody was quicker; else one more."""
        if to.branch is not None and to.num_answers == len(to.branch.ends):
            to.branch.episode.add_reply(to.messages, to.tokens, to.provenance)
            return to.branch
        episode = Episode(to.tokens) if to.branch is None else to.branch.episode.fork(to.num_answers)
        if to.branch is not None:
            episode.add_reply(to.messages, to.tokens, to.provenance)
        self._branches.append(Branch(episode, asked.session, asked.tools))
        return self._branches[-1]

    def joined(self, seat: str = "", left_out: Container[str] = ()) -> Episode | None:
        """A seat's as one rollout, or those of all who are not left out: that of the latest answer last. None if there
        is none."""
        kept = [b for b in self._branches if (b.session == seat if seat else b.session not in left_out)]
        if not kept:
            return None
        first, *others = sorted(kept, key=lambda branch: branch.last)
        for branch in others:
            first.episode.join(branch.episode)
        return first.episode
