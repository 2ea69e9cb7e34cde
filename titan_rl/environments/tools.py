"""Functions that a policy may call: declared with a JSON schema, run in the environment's process.

Every call is answered by text that the policy reads next: what the function returned, or a sentence about what is wrong
with the call (it could not be parsed, there is no such tool, its arguments do not fit the schema, or the function
raised `ToolError`). Any other exception is the function's own fault and costs the rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.environments.rubric import is_asynchronous
from titan_rl.errors import ConfigError, TaskError
from titan_rl.types import ToolCall, ToolSpec

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_CHECKED = {"type", "properties", "required", "additionalProperties", "items", "enum", "minimum", "maximum"}
_NOTES = {"description", "title", "default", "examples"}


class ToolError(Exception):
    """A tool cannot do what it was asked to; its text is told to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function, plain or `async def`: called with the arguments by name, returns text."""

    function: Callable[..., str | Awaitable[str]]
    description: str = ""
    """What it does, for the policy to read."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments: an object, of the keywords type, properties, required, additionalProperties, items,
    enum, minimum and maximum, besides notes for the reader (description, title, default, examples)."""
    name: str = ""
    """Defaults to the function's own name."""

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name or self.function.__name__, self.description, dict(self.parameters))


class Toolbox:
    """All tools of a task.

    Raises:
        ConfigError: two have one name, or a schema is none that is checked here.
    """

    def __init__(self, tools: Sequence[Tool]):
        self.specs = tuple(tool.spec for tool in tools)
        self._tools = {spec.name: (tool, spec) for tool, spec in zip(tools, self.specs, strict=True)}
        if len(self._tools) != len(self.specs):
            raise ConfigError(f"two tools have one name: {', '.join(spec.name for spec in self.specs)}")
        for spec in self.specs:
            if spec.parameters.get("type") != "object":
                raise ConfigError(f"tool {spec.name}: its parameters must be a schema of type object")
            _check_schema(spec.parameters, f"tool {spec.name}")
        self.asynchronous = any(is_asynchronous(tool.function) for tool in tools)

    def problem(self, call: ToolCall) -> str:
        """Why a call cannot be made, as a sentence; empty when it can."""
        if call.problem:
            return call.problem
        if call.name not in self._tools:
            return f"there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        return mismatch(self._tools[call.name][1].parameters, call.arguments)

    async def run(self, call: ToolCall) -> str:
        """The answer of a tool.

        Raises:
            ToolError: the call cannot be made, or the tool refuses.
            TaskError: the tool returned no text.
            Exception: whatever the function raises.
        """
        if problem := self.problem(call):
            raise ToolError(problem)
        result = self._tools[call.name][0].function(**call.arguments)
        answer = await result if inspect.isawaitable(result) else result
        if not isinstance(answer, str):
            raise TaskError(f"tool {call.name} returned {type(answer).__name__}, expected str")
        return answer


def mismatch(schema: Mapping[str, Any], value: Any, where: str = "the arguments") -> str:
    """The first way in which a value does not fit a schema, as a sentence; empty when it fits."""
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {value!r}"
    names = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if names and not any(_is(name, value) for name in names):
        return f"{where} must be of type {' or '.join(names)}, not {value!r}"
    if isinstance(value, dict):
        return _object_mismatch(schema, value, where)
    if isinstance(value, list):
        found = (mismatch(schema.get("items", {}), item, f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), "")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            return f"{where} must be at least {schema['minimum']}, not {value!r}"
        if value > schema.get("maximum", value):
            return f"{where} must be at most {schema['maximum']}, not {value!r}"
    return ""


def _object_mismatch(schema: Mapping[str, Any], value: Mapping[str, Any], where: str) -> str:
    known = schema.get("properties", {})
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{where} must have {', '.join(missing)}"
    # a function is called by name: what the schema does not know is refused unless it says otherwise
    if not schema.get("additionalProperties", False) and (unknown := [name for name in value if name not in known]):
        return f"{where} must not have {', '.join(unknown)}; there are {', '.join(known) or 'none'}"
    return next(filter(None, (mismatch(known[name], value[name], name) for name in value if name in known)), "")


def _is(name: str, value: Any) -> bool:
    if isinstance(value, bool):  # which Python counts among the integers
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{where}: {schema!r} is no JSON schema")
    if unknown := schema.keys() - _CHECKED - _NOTES:
        raise ConfigError(f"{where}: the keywords {', '.join(sorted(unknown))} are not checked; leave them out")
    types = schema.get("type", [])
    if unknown := {types} - _TYPES.keys() if isinstance(types, str) else set(types) - _TYPES.keys():
        raise ConfigError(f"{where}: there is no type {', '.join(sorted(unknown))}")
    if not isinstance(schema.get("additionalProperties", False), bool):
        raise ConfigError(f"{where}: additionalProperties must be true or false")
    for name, inner in schema.get("properties", {}).items():
        _check_schema(inner, f"{where}, {name}")
    if "items" in schema:
        _check_schema(schema["items"], f"{where}, items")
