"""vLLM's configuration and scheduler, imported without its OpenAI server, whose types take most of a second.

They import the server for a class that an annotation names, and for one that they know parsers by which this project
has none of. To be imported before anything else of vLLM; who asks for the server afterwards gets it.
"""

import sys
from types import ModuleType

from titan_rl.compat.reach import VLLM, Reach

_STANDS_FOR = {
    "vllm.entrypoints.mcp.tool_server": "ToolServer",
    "vllm.parser.engine.adapters": "ParserEngineReasoningAdapter",
}
REACHES = (
    Reach("vllm.reasoning.abs_reasoning_parsers:ToolServer", "import engines without vLLM's server"),
    Reach("vllm.v1.structured_output:ParserEngineReasoningAdapter", "import engines without vLLM's server"),
)

_absent = [name for name in _STANDS_FOR if name not in sys.modules]
for _name in _absent:
    sys.modules[_name] = ModuleType(_name)
    setattr(sys.modules[_name], _STANDS_FOR[_name], type(_STANDS_FOR[_name], (), {}))
try:
    VLLM.require(REACHES)
finally:
    for _name in _absent:
        del sys.modules[_name]
