"""vLLM's engine, imported without its OpenAI server, whose types take more than a second. Before the rest of vLLM.

Its configuration imports the server for a class that an annotation names, its scheduler for one that parsers are known
by, which this project has none of, and its engine to read messages, where prompts are tokens here. Who asks for the
server afterwards gets it.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

from titan_rl.compat.reach import VLLM, Reach

_STAND_INS = {
    "vllm.entrypoints.mcp.tool_server": "ToolServer",
    "vllm.parser.engine.adapters": "ParserEngineReasoningAdapter",
}
REACHES = (
    Reach("vllm.reasoning.abs_reasoning_parsers:ToolServer", "import engines without vLLM's server"),
    Reach("vllm.v1.structured_output:ParserEngineReasoningAdapter", "import engines without vLLM's server"),
)

_absent = [module for module in _STAND_INS if module not in sys.modules]
for _module in _absent:
    sys.modules[_module] = ModuleType(_module)
    setattr(sys.modules[_module], _STAND_INS[_module], type(_STAND_INS[_module], (), {}))
try:
    VLLM.require(REACHES)
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
