"""Building blocks for the schema: a section of keys, and the kinds of numbers that they accept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from pentameter.config.naming import checked_name
from pentameter.config.urls import given_path
from pentameter.errors import either

# Scalars are strict: `steps = true` or `steps = "8"` is a mistake, not 1 or 8.
LARGEST_COUNT = 2**31 - 1
"""Largest count: steps, rows and elements are indexed by 32-bit words in `keyed`."""
Positive = Annotated[int, Field(strict=True, ge=1, le=LARGEST_COUNT)]
NonNegative = Annotated[int, Field(strict=True, ge=0, le=LARGEST_COUNT)]
Width = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Depth = Annotated[int, Field(strict=True, ge=1, le=10_000)]
ByteCount = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, AfterValidator(checked_name), Field(json_schema_extra={"format": "name"})]
Day = Annotated[
    str,
    BeforeValidator(lambda day: day.isoformat() if type(day) is date else day),  # as TOML has them
    AfterValidator(lambda day: date.fromisoformat(day).isoformat()),
    Field(json_schema_extra={"format": "day"}),
]
"""A day, YYYY-MM-DD."""
GivenPath = Annotated[str, AfterValidator(given_path)]
Switch = Annotated[bool, Field(strict=True)]

ABSENT = "none"
"""The word for an absent value in TOML and on the command line, which have no null."""


class Section(BaseModel):
    """A frozen group of keys; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _read_absent(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        value.encode()  # a lone surrogate could never be written to the run folder's config.toml
        assert info.field_name is not None  # a field validator always has one
        optional = type(None) in get_args(cls.model_fields[info.field_name].annotation)
        return None if value == ABSENT and optional else value

    def first_set(self, keys: Iterable[str]) -> str | None:
        """Return the first of `keys` whose value is not its default; None if there is none."""
        fields = type(self).model_fields
        return next((key for key in keys if getattr(self, key) != fields[key].default), None)

    def check_effect(self, path: str, keys: Iterable[str], key: str, *values: str) -> None:
        """Raise ValueError if one of `keys` is set although it has no effect: they act only while
        `key` has one of `values`. path: this section's dotted path, for the message."""
        idle, value = self.first_set(keys), getattr(self, key)
        if idle is not None and value not in values:
            raise ValueError(
                f"{path}.{idle} has no effect with {path}.{key}={value or ABSENT!r}; set {path}."
                f"{key}={either(map(repr, values))}, or leave {idle} out"
            )

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values. `values` is dotted path → value, `{"attention.n_heads":
        4}` for a model; as with `model_copy`, they are not validated."""
        changed: dict[str, Any] = {}
        for path, value in values.items():
            key, _, inner = path.partition(".")
            section = changed.get(key, getattr(self, key))
            changed[key] = section.updated({inner: value}) if inner else value
        return self.model_copy(update=changed)
