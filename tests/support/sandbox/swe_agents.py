"""Programs of other people that drive a model, as ``task.options.agent`` has them."""

import importlib.util
from pathlib import Path
from typing import Any


def mini_swe_agent(*settings: str) -> dict[str, Any]:
    """mini-swe-agent of this environment. ``settings``: of its own, on top of those for a model without tool calls."""
    spec = importlib.util.find_spec("minisweagent")
    assert spec is not None and spec.origin is not None, "it is in the extra 'test'"
    flags = "-y --exit-immediately --agent-class default --model-class litellm_textbased -m openai/policy"
    given = " ".join(f"-c '{each}'" for each in ("mini_textbased.yaml", "model.cost_tracking=ignore_errors", *settings))
    return {
        "command": f'python3 -m minisweagent.run.mini {flags} {given} -o /tmp/trajectory.json -t "$ISSUE"',
        "shows": {"/agent": str(Path(spec.origin).parents[1])},
        "environment": {
            "PYTHONPATH": "/agent",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        "timeout": 120,
    }
