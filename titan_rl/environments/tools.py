"""Functions that a policy may call, run in the environment's processes.

Name, description and JSON schema are those of the function's signature and docstring; pydantic makes the schema, and
checks and converts the arguments of every call by it. Every call is answered by text that the policy reads next: what
the function returned, or a sentence about what is wrong with the call (it could not be read, there is no such tool, its
arguments do not fit, or the function raised `ToolError`). Any other exception is the function's own fault and costs the
rollout.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, get_args, get_origin

from titan_rl.environments.rubric import awaited, is_asynchronous
from titan_rl.errors import ConfigError, TaskError
from titan_rl.types import ToolCall, ToolSpec

_STATE = "state of the rollout"
State: TypeAlias = Annotated[Any, _STATE]
"""Annotation of a parameter that the policy does not see: it gets what `Environment.initial_state` made for this
rollout, as earlier calls have left it. Change it in place."""

_ARGUMENTS = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)(?: \([^)]*\))?:\s*(.*(?:\n(?!\s*\w+(?: \([^)]*\))?:).*)*)", re.MULTILINE)


class ToolError(Exception):
    """A tool cannot do what it was asked to; its text is told to the policy."""


def _is_state(kind: Any) -> bool:
    return get_origin(kind) is Annotated and _STATE in kind.__metadata__


class Tool:
    """A function that the policy may call, plain or `async def`: its parameters need type annotations, and it returns a
    text or a number. `@tool` makes it of a function. Calling it calls the function. Raises ConfigError: a parameter has
    no annotation, or one that JSON has no schema for."""

    def __init__(self, function: Callable[..., Any]):
        from typing import NotRequired

        from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, with_config
        from pydantic.json_schema import GenerateJsonSchema
        from typing_extensions import TypedDict

        class WithoutTitles(GenerateJsonSchema):
            def field_title_should_be_set(self, schema: Any) -> bool:
                return False

        self.function = function
        self.of_state: list[str] = []
        """Its parameters of type `State`."""
        name = getattr(function, "__name__", type(function).__name__)
        text = inspect.getdoc(function) or ""
        section = _ARGUMENTS.search(text)
        about = {key: " ".join(said.split()) for key, said in _ARGUMENT.findall(section[1])} if section else {}
        fields: dict[str, Any] = {}
        try:
            for parameter in inspect.signature(function, eval_str=True).parameters.values():
                if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    raise ConfigError(f"tool {name}: it is called by name, and {parameter} cannot be")
                if parameter.annotation is parameter.empty:
                    raise ConfigError(f"tool {name}: parameter {parameter.name} has no type annotation")
                kind = parameter.annotation
                if _is_state(kind):
                    self.of_state.append(parameter.name)
                    continue
                if any(map(_is_state, get_args(kind))):
                    raise ConfigError(f"tool {name}: parameter {parameter.name} may be a State and something else")
                if parameter.name in about:
                    kind = Annotated[kind, Field(description=about[parameter.name])]
                fields[parameter.name] = kind if parameter.default is parameter.empty else NotRequired[kind]
            Arguments = with_config(ConfigDict(extra="forbid"))(TypedDict(name, fields))  # type: ignore[operator]
            self.arguments: Any = TypeAdapter(Arguments)  # checks and converts those of a call
            schema = self.arguments.json_schema(schema_generator=WithoutTitles)
        except (PydanticUserError, NameError, ValueError) as error:
            raise ConfigError(f"tool {name}: its signature has no JSON schema ({error})") from error
        schema.pop("title", None)
        self.spec = ToolSpec(name, text[: section.start()].strip() if section else text, schema)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


tool = Tool


class Toolbox:
    """All tools of a task. Raises ConfigError: two have one name, or one is not made by `tool`."""

    def __init__(self, tools: Sequence[Tool]):
        for each in tools:
            if not isinstance(each, Tool):
                raise ConfigError(f"tools() gave {each!r}, which is no tool: decorate the function with @tool")
        self.specs = tuple(each.spec for each in tools)
        self._tools = {each.spec.name: each for each in tools}
        if len(self._tools) != len(tools):
            raise ConfigError(f"two tools have one name: {', '.join(spec.name for spec in self.specs)}")
        self.of_state = next((each.spec.name for each in tools if each.of_state), "")
        """A tool that has a parameter of type `State`, if one has."""
        self.asynchronous = any(is_asynchronous(each.function) for each in tools)

    async def answer(self, call: ToolCall, state: Any = None) -> str:
        """What the function returns. Raises ToolError if it cannot be asked, TaskError, or whatever it raises."""
        from pydantic import ValidationError

        if call.problem:
            raise ToolError(call.problem)
        if (asked := self._tools.get(call.name)) is None:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        try:
            arguments = asked.arguments.validate_python(call.arguments)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ToolError(f"the arguments of {call.name} do not fit: {'; '.join(wrong)}") from None
        answer = await awaited(asked.function(**arguments, **dict.fromkeys(asked.of_state, state)))
        if not isinstance(answer, (str, int, float)):
            raise TaskError(f"tool {call.name} returned {type(answer).__name__}, expected a text or a number")
        return str(answer)
