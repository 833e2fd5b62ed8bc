"""The fields of a chat request beside its messages that a chat template sees: tools, variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.errors import ConfigError, printable
from pentameter.serve.answer_forms.calls import FORMS
from pentameter.serve.answer_forms.grammars import AnswerGrammar
from pentameter.serve.constraints import Constraint
from pentameter.serve.endpoints.parsing import RequestError
from pentameter.serve.worker import ServedModel

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
TOOLS_NOT_SHOWN = "X-Tools-Not-Shown"
"""The header of a response that says why the model did not see the request's tools."""
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "documents"})
"""Variables that a chat template always gets, so that a request cannot give them."""


class Function(BaseModel):
    """A function that a model may call; `parameters` is a JSON schema."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that a model may use, which is a function."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"]
    function: Function


class Schema(BaseModel):
    """A JSON schema by which an answer is to be written. `strict` changes nothing: it always is."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str | None = None
    description: str | None = None
    of_content: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form in which an answer is to be written: any text, a JSON object, or JSON by a
    schema."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    def schema_of_content(self) -> dict[str, Any] | bool | None:
        """Return the JSON schema of the answer's content; None for any text. Raises RequestError if
        it is missing."""
        if self.type != "json_schema":
            return {"type": "object"} if self.type == "json_object" else None
        if self.json_schema is None:
            raise RequestError(
                "response_format.json_schema is missing, which has the schema",
                param="response_format",
            )
        return self.json_schema.of_content


class Named(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class NamedTool(BaseModel):
    """The choice of one tool."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: Named


def obstacle_to_tools(served: ServedModel) -> str | None:
    """Return why a model cannot be shown tools, as a sentence without its end: its template shows a
    model none, or writes calls in a form that is not known here. None if it can."""
    form = served.answer_form
    if not form.shows_tools:
        return f"the chat template of {served.name} writes no tools, so the model cannot see them"
    if form.writing is None:
        known = ", ".join([*(each.name for each in FORMS), "gpt-oss"])
        return (
            f"the chat template of {served.name} writes calls of tools in a form that is not known "
            f"here ({known} are)"
        )
    return None


def constraint(
    served: ServedModel,
    prompt_end: str,
    schema: dict[str, Any] | bool | None,
    tools: Sequence[Tool] | None,
    choice: str | NamedTool | None,
) -> Constraint | None:
    """Return the grammar to which an answer is held; None if any text may be one.

    prompt_end: end of the rendered prompt.
    schema: the JSON schema of the content, None for any.
    tools: those that the answer may call, None for none.
    choice: which of them it has to call: "required" for any; "auto" for none, or any if there is a
        schema, by which it may write instead.

    Raises RequestError if llguidance is missing, cannot serve this tokenizer, or refuses a schema.
    """
    known = {
        each.function.name: {"type": "object"} | (each.function.parameters or {})
        for each in tools or ()
    }
    if isinstance(choice, NamedTool):
        if choice.function.name not in known:
            raise RequestError(
                f"tool_choice names {choice.function.name!r}, which is none of the tools: "
                + ", ".join(known),
                param="tool_choice",
            )
        known = {choice.function.name: known[choice.function.name]}
    is_forced = choice is not None and choice != "auto" and bool(known)
    if is_forced:
        schema = None
    elif schema is None:
        return None
    grammar = AnswerGrammar(served.answer_form, served.tokenizer.special_tokens, prompt_end)
    try:
        return served.constraints.compiled(grammar.of(schema, known))
    except ConfigError as error:
        param = "tool_choice" if is_forced else "response_format"
        raise RequestError(f"{param}: {error}", param=param) from error


def template_variables(
    chat: ChatTemplate, given: dict[str, Any] | None, effort: Effort | None
) -> dict[str, Any]:
    """Return the variables for a chat template: those `given` (`chat_template_kwargs`), and what
    `effort` (`reasoning_effort`) stands for. Without effort, thinking is also disabled. Raises
    RequestError for a variable that the template does not read."""
    found = {}
    if effort is not None:
        asked: dict[str, Any] = {"reasoning_effort": effort}
        if effort == "none":
            asked["enable_thinking"] = False
        found = {name: value for name, value in asked.items() if _is_read(chat, name)}
        if not found and effort != "none":  # which asks for nothing
            raise RequestError(
                f"reasoning_effort is {effort!r}, but {chat.origin} does not read it; leave it out",
                param="reasoning_effort",
            )
    for name in given or {}:
        if name in _GIVEN or not _is_read(chat, name):
            why = "is set by the server" if name in _GIVEN else f"is not read by {chat.origin}"
            raise RequestError(
                f"chat_template_kwargs.{printable(name)[:80]} {why}; leave it out",
                param="chat_template_kwargs",
            )
    return found | (given or {})


def _is_read(chat: ChatTemplate, name: str) -> bool:
    word = re.compile(rf"\b{re.escape(name)}\b")
    return any(word.search(source) for source in chat.sources.values())
