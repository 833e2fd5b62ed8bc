"""A request's body: JSON, held to the fields of its endpoint, or refused in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pentameter.errors import lone_surrogate, printable

_Kind = TypeVar("_Kind", bound=BaseModel)


class RequestError(Exception):
    """A refused request: message, HTTP status, and OpenAI's `param` and `code`. Message and `param`
    may quote the request; characters that UTF-8 cannot encode are written as escapes."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(printable(message, keep="\n\t"))
        self.param = None if param is None else printable(param)
        self.status, self.code = status, code

    def to_json(self) -> dict[str, Any]:
        """Return the error as OpenAI's response body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


def parsed(kind: type[_Kind], body: Any) -> _Kind:
    """Return a JSON body parsed as `kind`. Raises RequestError, naming the field, if it is
    invalid."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        # For a value that may be of several types, there is an error for each type. The innermost
        # one is for the type that the value has.
        first = max(
            error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"])
        )
        field = str(first["loc"][0]) if first["loc"] else None
        where = f"{_path_of(first['loc'])}: " if field else ""
        raise RequestError(f"{where}{first['msg']}", param=field) from error


def _path_of(parts: Sequence[str | int]) -> str:
    """Return a field's path in a body, such as `messages[0].content[1].type`. `parts` is the path
    as pydantic reports it; the words with which it tells alternative types apart (`str`,
    `list[ContentPart]`) are left out."""
    kinds = {"str", "int", "float", "bool"}
    names = [part for part in parts if isinstance(part, int) or part not in kinds]
    names = [part for part in names if isinstance(part, int) or part.isidentifier()]
    spelled = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in names)
    return "".join(spelled).removeprefix(".")


def body_of(text: bytes) -> Any:
    """Return a request's body, parsed from JSON. Raises RequestError if it is not JSON, or if the
    name of a field, at any depth, cannot be encoded in UTF-8."""
    try:
        return json.loads(text, object_pairs_hook=_with_names)
    except (ValueError, RecursionError) as error:  # of json, or of UTF-8
        raise RequestError(f"the body is not JSON: {error}") from error


def _with_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, _ in pairs:
        if lone_surrogate(name) is not None:
            said = f"{printable(name)[:80]} is no field's name: it has half a surrogate pair"
            raise RequestError(said, param=name[:80])
    return dict(pairs)
