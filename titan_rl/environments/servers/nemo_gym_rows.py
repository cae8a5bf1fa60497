"""Rows of NeMo Gym's data files: ``responses_create_params`` with messages and tools, and the server's fields.

They become conversations and schemas of ours, row by row; whatever is wrong is a ConfigError with file and line.
"""

import re
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_fields import check_finite, joined, names, shown
from titan_rl.data.rows.row_messages import messages
from titan_rl.data.text.messages import Message
from titan_rl.environments.prompts.row_files import DataRow

PARAMETERS = "responses_create_params"
_ROLES = {"developer": "system"}
"""Their names of ours."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_TOOLS = ("seed_session", "verify")
"""Paths of the server, and no names of tools."""


def parse_row(place: str, columns: dict[str, Any]) -> DataRow:
    """Checked row. Errors: ConfigError."""
    if not isinstance(columns.get(PARAMETERS), dict):
        raise ConfigError(f"{place}: no {PARAMETERS!r}, which NeMo Gym's rows have; {names(columns, [PARAMETERS])}")
    conversation = messages_of(place, columns)
    if conversation[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: the last of 'input' is the assistant's own: end with one that it must answer")
    schemas_of(place, columns)
    check_finite(place, columns)
    return DataRow(place, columns, joined(conversation), conversation, None)


def messages_of(place: str, row: dict[str, Any]) -> list[Message]:
    """Messages of a row. Errors: ConfigError for what is no text."""
    parameters = row[PARAMETERS]
    raw, instructions = parameters.get("input"), parameters.get("instructions")
    items = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
    if not isinstance(items, list):
        raise ConfigError(f"{place}: 'input' is {shown(raw)}: give text or a list of messages")
    before = [{"role": "system", "content": instructions}] if instructions else []
    return messages(place, "input", [*before, *(_message(place, item) for item in items)])


def _message(place: str, item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise ConfigError(f"{place}: 'input' holds {shown(item)}: only messages are played")
    role, content = item.get("role"), item.get("content")
    if isinstance(content, list):
        content = "\n".join(_text(place, part) for part in content)
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content}


def _text(place: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise ConfigError(f"{place}: a message holds {shown(part)}: only text is played")
    return part["text"]


def schemas_of(place: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, description and parameters of each tool. Errors: ConfigError."""
    tools = row[PARAMETERS].get("tools") or []
    if not isinstance(tools, list):
        raise ConfigError(f"{place}: 'tools' is {shown(tools)}: give a list")
    return [_schema(place, tool) for tool in tools]


def _schema(place: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ConfigError(f"{place}: 'tools' holds {shown(tool)}: only tools of type 'function' are played")
    name, parameters = tool.get("name"), tool.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _NO_TOOLS:
        raise ConfigError(f"{place}: a tool has the name {shown(name)}: give letters, digits, '_' or '-'")
    if not isinstance(parameters, dict):
        raise ConfigError(f"{place}: tool {name}: its parameters are {shown(parameters)}: give a JSON schema")
    return {"name": name, "description": tool.get("description") or "", "parameters": parameters}
