"""From what a file says below ``options`` to the job's own options class, with the class's own checks."""

from __future__ import annotations

import re
import typing
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model

from memwal_ops.errors import JobPluginError
from memwal_ops.supervisor.config_model import Duration, Whole, read_size

if TYPE_CHECKING:
    from collections.abc import Mapping

# What option classes import for their annotations alone.
_KNOWN = {"UUID": UUID, "timedelta": timedelta}
_Bytes = Annotated[int, BeforeValidator(read_size)]
_OPTION = re.compile(r"--([a-z][a-z-]*)")


@cache
def options_model(options: Any) -> type[BaseModel]:
    """A model with the fields, types and defaults of an options class.

    Raises:
        JobPluginError: its annotations cannot be read.
    """
    try:
        hints = typing.get_type_hints(options, localns=_KNOWN)
    except Exception as error:
        raise JobPluginError(f"The annotations of {options.__qualname__} cannot be read: {error}") from error
    shape: dict[str, Any] = {}
    for one in fields(options):
        # The default is never used: what the file says nothing of, the class has its own default for.
        shape[one.name] = (_annotation(one.name, hints[one.name]), None)
    return create_model(options.__name__, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **shape)


def make_options(options: type[Any], given: Mapping[str, Any]) -> Any:
    """The job's options.

    Raises:
        pydantic.ValidationError: a key or a type is wrong.
        InvalidUsageError: the class refuses a value.
    """
    return _instance(options, options_model(options).model_validate(dict(given)))  # type: ignore[arg-type]


def option_names(options: type[Any]) -> list[str]:
    """The keys below ``options``."""
    return [one.name for one in fields(options)]


def in_config_words(message: str) -> str:
    """A refusal with names as a file has them: ``max_bytes`` for ``--max-bytes``."""
    return _OPTION.sub(lambda match: match[1].replace("-", "_"), message)


def _instance(options: type[Any], model: BaseModel) -> Any:
    given = {}
    hints = typing.get_type_hints(options, localns=_KNOWN)
    for name in model.model_fields_set:
        value = getattr(model, name)
        given[name] = _instance(hints[name], value) if is_dataclass(hints[name]) else value
    return options(**given)


def _annotation(name: str, hint: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return options_model(hint)
    if hint is int or hint == int | None:
        base: Any = _Bytes if "bytes" in name else Whole
        return base if hint is int else base | None
    if hint is timedelta or hint == timedelta | None:
        return Duration if hint is timedelta else Duration | None
    return hint
