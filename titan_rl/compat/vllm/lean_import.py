"""vLLM's engine, imported without what engines here have no use for. Before the rest of vLLM.

* Its OpenAI server, whose types take more than a second: its configuration imports it for a class that an annotation
  names, its scheduler for one that parsers are known by, which this project has none of, and its engine to read
  messages, where prompts are tokens here.
* OpenTelemetry, for traces that nobody asks for.
* torch's compiler, which takes another second, where nothing is compiled: vLLM mends what it does with operators, and
  compiles functions of its own as they are imported.

A later import gets the real module.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

from titan_rl.compat.reach import VLLM, Reach
from titan_rl.compat.torch.compiling import import_no_disabled_compiler, is_compiler_disabled

_STAND_INS = {
    "vllm.entrypoints.mcp.tool_server": "ToolServer",
    "vllm.parser.engine.adapters": "ParserEngineReasoningAdapter",
}
REACHES = (
    Reach("vllm.reasoning.abs_reasoning_parsers:ToolServer", "import engines without vLLM's server"),
    Reach("vllm.v1.structured_output:ParserEngineReasoningAdapter", "import engines without vLLM's server"),
)

_LEFT_OUT = ("opentelemetry", *(("torch._inductor.lowering",) if is_compiler_disabled() else ()))
"""vLLM goes on without these where Python finds none."""

import_no_disabled_compiler()
_absent = [module for module in (*_STAND_INS, *_LEFT_OUT) if module not in sys.modules]
for _module in _absent:
    if _module in _LEFT_OUT:
        sys.modules[_module] = None  # pyright: ignore[reportArgumentType]
    else:
        sys.modules[_module] = ModuleType(_module)
        setattr(sys.modules[_module], _STAND_INS[_module], type(_STAND_INS[_module], (), {}))
try:
    VLLM.require(REACHES)
    import vllm.tracing  # noqa: F401
finally:
    for _module in _absent:
        del sys.modules[_module]

from vllm.renderers.base import BaseRenderer
from vllm.renderers.registry import RENDERER_REGISTRY


class TokenRenderer(BaseRenderer[Any]):
    """Renderer of prompts that are tokens, and so no messages."""

    def render_messages(self, messages: Any, params: Any) -> NoReturn:
        raise NotImplementedError("prompts are rendered before they come to an engine (data/text/rendering.py)")


RENDERER_REGISTRY.renderers["hf"] = (__name__, TokenRenderer.__name__)
