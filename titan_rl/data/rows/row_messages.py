"""Messages of a data file's row, with the tools and the template's options beside them, each checked.

    messages, prompt, chosen, ...   [{role, content, ...}], in OpenAI's form: tool_calls, tool_call_id, name, and an
                                    assistant's reasoning_content (thinking, reasoning); content may be text parts
    tools                           JSON schemas of what may be called, or JSON of the list
    chat_template_kwargs            the row's own options for the chat template, over the run's

Errors are a ConfigError of one line with the row's place.
"""

from typing import Any

from titan_rl.config.io.bounded_files import KeyTwice, each_once, json_fault, parse_json
from titan_rl.config.load import ConfigError, nearest
from titan_rl.data.rows.row_fields import check_finite, encodable, shown, text
from titan_rl.data.text.messages import IMAGE_MARK, REASONING, Message, MessageCall, message

TOOLS, TEMPLATE_OPTIONS = "tools", "chat_template_kwargs"
_ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
_OF_ASSISTANT = ("tool_calls", *REASONING)
_OTHER_ROLES = {"developer": "system", "function": "tool"}
"""Former and newer names of OpenAI's."""
Schema = dict[str, Any]


def messages(place: str, name: str, value: Any, *, has_images: bool = False) -> list[Message]:
    """Messages column of a row. ``has_images``: whether parts may stand for images of the row's.

    Errors: ConfigError for anything but a list of messages that is not empty."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place}: {name!r} is {shown(value)}: give a list of {{role, content}}")
    return [_message(f"{place}: message {number}", each, has_images) for number, each in enumerate(value, 1)]


def _message(place: str, value: Any, has_images: bool) -> Message:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {shown(value)}: give {{role, content}}")
    fields = {key: each for key, each in value.items() if each is not None}  # Parquet has all keys in all rows
    role = _role(place, fields)
    if (unknown := next((key for key in fields if key not in _KEYS), None)) is not None:
        raise ConfigError(f"{place} has {unknown!r}, which no message has: leave it out ({nearest(unknown, _KEYS)})")
    for key in _OF_ASSISTANT:
        if key in fields and role != "assistant":
            raise ConfigError(f"{place}: {key!r} belongs to the assistant's messages, and this is of {role!r}")
    checked: Any = _content(place, value, role, has_images)
    checked |= _reasoning(place, fields)
    checked |= {key: text(place, key, fields[key]) for key in ("name", "tool_call_id") if key in fields}
    if calls := _calls(place, fields.get("tool_calls")):
        checked["tool_calls"] = calls
    return checked


def _role(place: str, fields: dict[str, Any]) -> str:
    if "role" not in fields:
        raise ConfigError(f"{place} has {', '.join(map(repr, fields)) or 'nothing'}: give role and content")
    role = fields["role"]
    role = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise ConfigError(f"{place}: role {role!r} is unknown: {nearest(str(role), _ROLES)}")
    return role


def _content(place: str, value: dict[str, Any], role: str, has_images: bool) -> dict[str, Any]:
    """Role and content; the content is as the row has it where there is none beside tool calls."""
    content = value.get("content")
    if isinstance(content, list):
        content = _joined_parts(place, content, has_images and role == "user")
    says_otherwise = value.get("tool_calls") or (role == "tool" and content == "")
    if says_otherwise and (content is None or content == ""):
        return {"role": role} | ({"content": content} if "content" in value else {})
    if content is None:
        raise ConfigError(f"{place} has no content: give role and content, or tool_calls of the assistant")
    return dict(message(role, text(place, "content", content)))


def _joined_parts(place: str, parts: list[Any], has_images: bool) -> str:
    """Text parts, one behind the other, as templates of models with images write them; marks of a row's images."""
    for part in parts:
        if has_images and isinstance(part, dict) and {**part, "text": None} == {"type": "image", "text": None}:
            continue
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            what = f"a part of type {kind!r}" if isinstance(kind, str) and kind != "text" else shown(part)
            raise ConfigError(
                f"{place}: 'content' holds {what}: only text, and images of the row's column 'images', can be trained; "
                f"leave the row out"
            )
    return "".join(IMAGE_MARK if part.get("type") == "image" else part["text"] for part in parts)


def _reasoning(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in REASONING if name in fields and fields[name] != ""]
    if len(names) > 1 and len({str(fields[name]) for name in names}) > 1:
        raise ConfigError(f"{place} has {' and '.join(map(repr, names))}: keep one of them")
    return {name: text(place, name, fields[name]) for name in names[:1]}


# tool calls


def _calls(place: str, value: Any) -> list[MessageCall]:
    calls = _from_json(place, "tool_calls", value)
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ConfigError(f"{place}: 'tool_calls' is {shown(calls)}: give a list of {{function: {{name, arguments}}}}")
    return [_call(f"{place}: tool call {number}", call) for number, call in enumerate(calls, 1)]


def _call(place: str, call: Any) -> MessageCall:
    """A call, in the form with ``function``; a bare one of name and arguments gets it."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f"{place} is {shown(call)}: give {{function: {{name, arguments}}}}")
    if (kind := call.get("type") or "function") != "function":
        raise ConfigError(f"{place} is of type {shown(kind)}: only calls of functions can be trained")
    arguments = function.get("arguments")
    arguments = _from_json(place, "arguments", arguments) if arguments != "" else {}
    if not isinstance({} if arguments is None else arguments, dict):
        raise ConfigError(f"{place}: 'arguments' is {shown(arguments)}: give an object, or JSON of one")
    check_finite(place, {"arguments": arguments})
    name = encodable(place, "name", function["name"])
    checked: MessageCall = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    if call.get("id"):
        checked["id"] = text(place, "id", call["id"])
    return checked


def _from_json(place: str, name: str, value: Any) -> Any:
    """A value, or what it is JSON of. Errors: ConfigError for text that is not JSON, or has a key twice."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, pairs=each_once)
    except KeyTwice as error:
        raise ConfigError(f"{place}: {name!r}: {error}") from None
    except ValueError as error:
        why = json_fault(error)
        raise ConfigError(f"{place}: {name!r} is text that is not JSON ({why}): give the object itself") from None


# beside messages


def tools(place: str, columns: dict[str, Any]) -> list[Schema]:
    """Tools column of a row, as it stands there; empty without one. Errors: ConfigError for what is no JSON schema."""
    value = _from_json(place, TOOLS, columns.get(TOOLS) or None)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ConfigError(f"{place}: {TOOLS!r} is {shown(value)}: give a list of JSON schemas, or rename the column")
    check_finite(place, {TOOLS: value})
    return [_schema(place, each) for each in value]


def _schema(place: str, value: Any) -> Schema:
    schema = _from_json(place, TOOLS, value)
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{place}: {TOOLS!r} holds {shown(schema)}: give {{type: 'function', function: {{name, parameters}}}}, or "
            f"rename the column"
        )
    return schema


def template_options(place: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Options of a row for the chat template; empty without any. Errors: ConfigError for what is no table of them."""
    value = _from_json(place, TEMPLATE_OPTIONS, columns.get(TEMPLATE_OPTIONS) or None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {TEMPLATE_OPTIONS!r} is {shown(value)}: give an object, such as enable_thinking")
    check_finite(place, {TEMPLATE_OPTIONS: value})
    return {name: each for name, each in value.items() if each is not None}


def without_filled(columns: dict[str, Any]) -> dict[str, Any]:
    """Row of a table without the keys that Arrow filled with null in messages, and in what stands beside them."""
    return {name: _without_filled(name, value) for name, value in columns.items()}


def _without_filled(name: str, value: Any) -> Any:
    if _is_message_column(name, value):
        return _without_nulls(value)
    if isinstance(value, list):  # conversations, or tables that hold some
        return [_without_filled("", each) for each in value]
    return without_filled(value) if isinstance(value, dict) else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def _is_message_column(name: str, value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
    return name in (TOOLS, TEMPLATE_OPTIONS) or (is_list and any("role" in each for each in value))
