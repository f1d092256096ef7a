"""Read a YAML file that a person wrote into a pydantic model, and say what is wrong in that person's terms.

Invariant: a problem in the file ends in one SpecError whose lines each name the file, the line, the field,
the value and what was expected. YAML is read with `safe_load` semantics, at most 1 MiB, without aliases (an
alias can make a small file expand without end).
"""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

M = TypeVar("M", bound=BaseModel)
MOST_BYTES = 1 << 20


class SpecError(Exception):
    """A file that cannot be used; `str(error)` is the text for its author, one line for each problem."""


class Strict(BaseModel):
    """A frozen model in which an unknown key is an error that names the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise unknown_key(str(key), list(cls.model_fields))
        return data


def unknown_key(key: str, known: list[str]) -> PydanticCustomError:
    """The error for a key that is none of `known`."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    expected = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
    return PydanticCustomError("unknown_key", "unknown key; {expected}", {"key": key, "expected": expected})


def read_spec(model: type[M], text: str | bytes, name: str) -> M:
    """The model that the YAML text describes. Raises SpecError; `name` stands for the file in its lines."""
    data, lines = _load(text, name)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = [_problem(name, lines, dict(problem)) for problem in error.errors(include_url=False)]
        raise SpecError("\n".join(dict.fromkeys(found))) from None


def _load(text: str | bytes, name: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """The data, and the line of every key and item by its path."""
    if len(text) > MOST_BYTES:
        raise SpecError(f"{name}: {len(text)} bytes; expected at most {MOST_BYTES}")
    loader = None
    try:
        loader = yaml.SafeLoader(text.decode() if isinstance(text, bytes) else text)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise SpecError(f"{name}: YAML aliases (*name) are not accepted here; write the value out")
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except UnicodeDecodeError:
        raise SpecError(f"{name}: not a text file (UTF-8 expected)") from None
    except RecursionError:
        raise SpecError(f"{name}: nested too deeply") from None
    except ValueError as error:  # a date such as 2026-02-30, which YAML reads as a date
        raise SpecError(f"{name}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", "not YAML")
        raise SpecError(f"{name}:{line} not valid YAML: {what}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if node is None or not isinstance(data, dict):
        raise SpecError(
            f"{name}: expected keys and values, found {'nothing' if data is None else type(data).__name__}"
        )
    lines: dict[tuple[str, ...], int] = {}
    _note_lines(node, (), lines)
    return data, lines


def _note_lines(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[*path, str(key.value)] = key.start_mark.line + 1
            _note_lines(value, (*path, str(key.value)), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(value, (*path, str(index)), lines)


def _problem(name: str, lines: dict[tuple[str, ...], int], problem: dict[str, Any]) -> str:
    where = tuple(str(part) for part in problem["loc"])
    if problem["type"] == "unknown_key":
        where = (*where, problem["ctx"]["key"])
    near = where
    while near and near not in lines:  # a missing key, or a member of a union, has no line of its own
        near = near[:-1]
    place = f"{name}:{lines.get(near, 1)}: {'.'.join(where) or 'the file'}"
    if problem["type"] == "missing":
        return f"{place}: missing; it is required"
    shown = (
        ""
        if problem["type"] == "unknown_key" or isinstance(problem["input"], dict)
        else f" {problem['input']!r:.80}:"
    )
    return f"{place}:{shown} {problem['msg'].removeprefix('Value error, ')}"
