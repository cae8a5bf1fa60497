"""Rows of data become examples: the samples that a step is trained on, tokenized once. Pure.

A sample of an example is one answer to what the row asks: one of a demonstration or a label, and two of a pair, the
chosen one first, which never part (packing.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_messages import TEMPLATE_OPTIONS, TOOLS
from titan_rl.data.rows.row_shapes import ParsedRow, Written
from titan_rl.data.text.chat_template import Tools
from titan_rl.data.text.conversation import Tokens, encode_completion, encode_conversation, encode_text, first_unknown
from titan_rl.data.text.message_forms import texts_of
from titan_rl.data.text.messages import message
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.tokenizer import Tokenizer, has_unknown_words
from titan_rl.data.types import Provenance, Sample, is_model


@dataclass(frozen=True)
class Example:
    """One row, tokenized."""

    place: str
    text: str
    """What is asked (splits.py)."""
    samples: tuple[Sample, ...]
    source: int = 0
    """Number of its source among those of ``data.file``."""

    @property
    def num_tokens(self) -> int:
        """That its samples take up in one row, whose last tokens are only targets."""
        shared = self.shared
        return shared + sum(len(sample.tokens) - 1 - shared for sample in self.samples)

    @property
    def shared(self) -> int:
        """The tokens before the first answer, which a pair has in common."""
        return int(is_model(self.samples[0].provenance).argmax()) if len(self.samples) > 1 else 0


def make_example(row: ParsedRow, tokenizer: Tokenizer, *, as_chat: bool) -> Example:
    """Tokenized row.

    ``as_chat``: text is a user's and the assistant's message. Errors: ConfigError that begins with the row's place, for
    text that the tokenizer or the template cannot write, or an answer without a token.
    """
    try:
        _check_beside_text(row, as_chat=as_chat)
        tokenizer = with_options(tokenizer, row.template_options)
        samples = [
            _sample(row, number, _encoder(row.prompt, answer, as_chat, row.tools)(tokenizer))
            for number, answer in enumerate(row.answers)
        ]
        _check_known(tokenizer, row, samples)
    except ConfigError as error:
        raise ConfigError(f"{row.place}: {error}") from None
    return Example(row.place, row.text, tuple(samples), row.source)


def _check_beside_text(row: ParsedRow, *, as_chat: bool) -> None:
    """Errors: ConfigError for tools or options of the chat template beside text, which no template writes."""
    is_text = all(isinstance(answer, str) for answer in row.answers) and not as_chat
    for name, value in ((TOOLS, row.tools), (TEMPLATE_OPTIONS, row.template_options)):
        if is_text and value:
            raise ConfigError(f"{name!r} needs data.chat = true beside text: set it, or rename the column")


def _encoder(prompt: Written, answer: Written, as_chat: bool, tools: Tools) -> Callable[..., Tokens]:
    if isinstance(answer, str):
        assert isinstance(prompt, str), "a row whose answer is text has its prompt as text, too (shapes.py)"
        if not as_chat and not prompt:
            return partial(encode_text, text=answer)
        if not as_chat:
            return partial(encode_completion, prompt=prompt, completion=answer)
        prompt, answer = [message("user", prompt)] if prompt else [], [message("assistant", answer)]
    messages = [] if isinstance(prompt, str) else prompt
    return partial(encode_conversation, prompt=messages, answer=answer, tools=tools)


def _sample(row: ParsedRow, number: int, tokens: Tokens) -> Sample:
    """Its advantage is what the row says of it: of a pair the margin, which belongs to the chosen one."""
    tokens_T, provenance_T = tokens
    learned_T = is_model(provenance_T)
    if not learned_T.any() or learned_T[0]:
        raise ConfigError("there is no token before the answer, or none in it: give both a prompt and an answer")
    value = row.value if number == 0 else 0.0
    stop = len(tokens_T) - int(learned_T[::-1].argmax())  # nothing is learned from what the template writes at the end
    tokens_T, provenance_T = tokens_T[:stop], provenance_T[:stop]
    return Sample(tokens_T, provenance_T, np.zeros(len(tokens_T), np.float32), value, row.place, number)


def _check_known(tokenizer: Tokenizer, row: ParsedRow, samples: list[Sample]) -> None:
    """Errors: ConfigError for a character that the tokenizer does not know."""
    if not has_unknown_words(tokenizer) or not any((s.tokens == tokenizer.unk_token_id).any() for s in samples):
        return
    texts = [row.prompt, *row.answers]
    parts = [
        part
        for each in texts
        for part in ([each] if isinstance(each, str) else chain.from_iterable(map(texts_of, each)))
    ]
    if (
        character := next((unknown for part in parts if (unknown := first_unknown(tokenizer, part)) is not None), None)
    ) is None:
        return  # it is the end of a sequence, or its beginning, in models that have no token of its own for it
    raise ConfigError(
        f"the model's tokenizer does not know {character!r}: leave it out, or set model.path to another model"
    )


def mismatched(examples: Sequence[Example], others: Sequence[Example], row_tokens: int) -> list[Example]:
    """Examples of each question with the answer to another question: the nearest before it, going round, or else the
    first of ``others``. What KTO measures its zero on (arXiv 2402.01306, section 4.2). Of samples whose answer comes
    last; a question for which no answer fits into ``row_tokens`` is left out."""
    mismatches = []
    for number, example in enumerate(examples):
        candidates = chain(reversed(examples[:number]), reversed(examples[number:]), others)
        answers = (other.samples[0] for other in candidates if other.text != example.text)
        pairs = (pair for answer in answers if (pair := _with_answer(example, answer)).num_tokens <= row_tokens)
        mismatches += islice(pairs, 1)
    return mismatches


def _with_answer(example: Example, other: Sample) -> Example:
    sample = example.samples[0]
    begin, start = (int(is_model(each.provenance).argmax()) for each in (sample, other))
    tokens = np.concatenate([sample.tokens[:begin], other.tokens[start:]])
    provenance = np.concatenate([sample.provenance[:begin], other.provenance[start:]])
    logprobs = np.zeros(len(tokens), np.float32)
    return replace(
        example, samples=(replace(sample, tokens=tokens, provenance=provenance, logprobs=logprobs, advantage=0.0),)
    )


def label_of(example: Example) -> float:
    """Label of an example of one answer: desirable (1) or not (-1)."""
    label = example.samples[0].advantage
    assert not isinstance(label, np.ndarray), "an answer of data has one label, and none for each token"
    return label


def as_pairs(examples: Sequence[Example], row_tokens: int) -> list[Example]:
    """Preference pairs of labelled examples: the first desirable and the first undesirable answer to each question with
    both."""
    by_question: dict[str, dict[bool, Example]] = {}
    for example in examples:
        by_question.setdefault(example.text, {}).setdefault(label_of(example) > 0, example)
    both = (each for each in by_question.values() if len(each) == 2)
    pairs = [Example(each[True].place, each[True].text, each[True].samples + each[False].samples) for each in both]
    return [pair for pair in pairs if _has_one_prompt(pair) and pair.num_tokens <= row_tokens]


def _has_one_prompt(pair: Example) -> bool:
    begin = pair.shared
    first, second = (sample.tokens[:begin] for sample in pair.samples)
    return np.array_equal(first, second) and pair.samples[1].provenance[begin] == Provenance.MODEL
