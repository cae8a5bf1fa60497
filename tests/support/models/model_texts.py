"""Small tokenizers with the chat templates of the field, in short."""

import string
from collections.abc import Callable
from dataclasses import dataclass

from chat_templates import CHATML
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from titan_rl.data.text.tokenizer import TextSettings, set_text

WORDS = ["ask", "ho", "no", "user", "assistant", "model", "system", "tool", "hello", "again"]


def byte_pairs(special: list[str], *, bos: str = "", is_special: bool = True, **named: str) -> PreTrainedTokenizerFast:
    """``bos``: what its post-processor begins every text with."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([" ".join(WORDS), "\n\n".join(WORDS)] * 20, trainer)
    return _with_added(tokenizer, special, is_special, bos, named)


def sentence_pieces(
    special: list[str], *, bos: str = "", is_special: bool = True, **named: str
) -> PreTrainedTokenizerFast:
    """As converted from SentencePiece: a space before whatever text it is given, and behind each special token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.printable.strip()]
    words += WORDS + [f"▁{word}" for word in WORDS]
    scores = [(word, -float(len(word) < 2)) for word in words]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _with_added(tokenizer, special, is_special, bos, named)


def _with_added(
    tokenizer: Tokenizer, added: list[str], is_special: bool, bos: str, named: dict[str, str]
) -> PreTrainedTokenizerFast:
    """``added`` stand in the list of added tokens alone, as tokenizer.json has them."""
    add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
    add([AddedToken(word, special=is_special, normalized=False) for word in added])
    if bos:
        post = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = post
        named |= {"bos_token": bos}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)


QWEN_3 = (  # an answer without thoughts has empty ones where it is the last; a tool's result stands in a user's turn
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA_3 = (  # what the system says stands before the first user's words
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}[INST] {{ m.content }}[/INST]"
    "{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GPT_OSS = (  # channels; the last answer ends otherwise than those before
    "<|start|>system<|message|>{{ strftime_now('%Y-%m-%d') }}<|end|>{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = (  # the beginning of the next turn ends an answer
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
COMMAND_R = {
    "default": "{{ bos_token }}{% for m in messages %}<|TURN|><|{{ m.role | upper }}|>{{ m.content }}<|END_TURN|>"
    "{% endfor %}{% if add_generation_prompt %}<|TURN|><|ASSISTANT|>{% endif %}",
    "tool_use": "{{ bos_token }}<|TURN|><|SYSTEM|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|END_TURN|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|TURN|><|SYSTEM|><results>{{ m.content }}</results><|END_TURN|>"
    "{% else %}<|TURN|><|{{ m.role | upper }}|>{{ m.content }}<|END_TURN|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|TURN|><|ASSISTANT|>{% endif %}",
}


@dataclass(frozen=True)
class ModelText:
    """A model, as far as text goes."""

    make: Callable[..., PreTrainedTokenizerFast]
    template: str | dict[str, str] | None
    special: tuple[str, ...]
    end: str
    """What ends an answer."""
    stops: tuple[str, ...] = ()
    """What stops its engine, besides ``end``."""
    bos: str = ""
    named: tuple[tuple[str, str], ...] = ()
    settings: TextSettings = TextSettings()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        made = self.make(list(self.special), bos=self.bos, **dict(self.named))
        made.chat_template = self.template
        set_text(made, self.settings)
        return made

    def stop_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        return sorted(tokenizer.convert_tokens_to_ids([self.end, *self.stops]))


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_PHI = ("<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>")
_OSS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
_GLM = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>")
_COHERE = ("<BOS_TOKEN>", "<|TURN|>", "<|END_TURN|>", "<|USER|>", "<|ASSISTANT|>", "<|SYSTEM|>", "<|TOOL|>")
_IM_END = (("eos_token", "<|im_end|>"),)
MODELS = {
    "smollm2": ModelText(byte_pairs, CHATML, _IM, "<|im_end|>", named=_IM_END),
    "qwen3": ModelText(byte_pairs, QWEN_3, _IM, "<|im_end|>", named=_IM_END),
    "qwen3 without thinking": ModelText(
        byte_pairs, QWEN_3, _IM, "<|im_end|>", named=_IM_END, settings=TextSettings({"enable_thinking": False})
    ),
    "llama3": ModelText(
        byte_pairs, LLAMA_3, _LLAMA, "<|eot_id|>", bos="<|begin_of_text|>", named=(("eos_token", "<|eot_id|>"),)
    ),
    "gemma3": ModelText(
        sentence_pieces,
        GEMMA_3,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        ("<eos>",),
        "<bos>",
        (("eos_token", "<eos>"),),
    ),
    "mistral": ModelText(
        sentence_pieces, MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", (), "<s>", (("eos_token", "</s>"),)
    ),
    "phi3": ModelText(
        sentence_pieces, PHI_3, _PHI, "<|end|>", ("<|endoftext|>",), "", (("eos_token", "<|endoftext|>"),)
    ),
    "gpt_oss": ModelText(
        byte_pairs,
        GPT_OSS,
        _OSS,
        "<|return|>",
        ("<|call|>",),
        named=(("eos_token", "<|return|>"),),
        settings=TextSettings(keep_special=True),
    ),
    "glm": ModelText(
        byte_pairs, GLM, _GLM, "<|user|>", ("<|observation|>", "<|endoftext|>"), named=(("eos_token", "<|endoftext|>"),)
    ),
    "command_r": ModelText(
        byte_pairs, COMMAND_R, _COHERE, "<|END_TURN|>", bos="<BOS_TOKEN>", named=(("eos_token", "<|END_TURN|>"),)
    ),
}
BASE = {
    "base": ModelText(byte_pairs, None, ("<|endoftext|>",), "<|endoftext|>", named=(("eos_token", "<|endoftext|>"),)),
    "base, sentence pieces": ModelText(
        sentence_pieces, None, ("<s>", "</s>"), "</s>", bos="<s>", named=(("eos_token", "</s>"),)
    ),
}
"""Without a template."""
