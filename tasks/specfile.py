"""Read a YAML file that a person wrote into a pydantic model, and say what is wrong in that person's terms.

Invariant: a problem in the file ends in one SpecError whose lines each name the file, the line, the field,
the value and what was expected. YAML is read with `safe_load` semantics, at most 256 KiB, without aliases (an
alias can make a small file expand without end) and not deeply nested (its parser takes quadratic time); an
instant stays the text that was written, for its field to read.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from training.config import EXPECTED as PLAIN

M = TypeVar("M", bound=BaseModel)
MOST_BYTES = 1 << 18
MOST_LEVELS = 50
OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
EXPECTED = {  # pydantic's types of errors in words for people who do not know Python
    **PLAIN,
    "string_type": "expected a text; put it in quotes",
    "string_unicode": "expected a text of whole characters",
    "string_too_long": "expected at most {max_length} characters",
    "string_pattern_mismatch": "expected letters, digits, '.', '_' and '-', beginning with a letter or digit",
    "int_parsing_size": "expected a smaller number",
    "tuple_type": "expected a list",
    "too_short": "expected at least {min_length} of them",
    "dict_type": "expected keys and values",
    "model_type": "expected keys and values",
    "datetime_type": "expected an instant such as 2026-12-01T06:00Z",
    "datetime_parsing": "expected an instant such as 2026-12-01T06:00Z",
    "datetime_from_date_parsing": "expected an instant such as 2026-12-01T06:00Z",
    "datetime_object_invalid": "expected an instant such as 2026-12-01T06:00Z",
}


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

    @field_validator("*", mode="before")
    @classmethod
    def _no_flags(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes, no, on and off as truth values, which Python takes for 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected a number or a text; put yes, no, on and off in quotes")
        return value


def unknown_key(key: str, known: list[str]) -> PydanticCustomError:
    """The error for a key that is none of `known`."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    expected = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
    return PydanticCustomError("unknown_key", "unknown key; {expected}", {"key": key, "expected": expected})


def read_spec(
    model: type[M], text: str | bytes, name: str, check: Callable[[M], str | None] = lambda _: None
) -> M:
    """The model that the YAML text describes. Raises SpecError; `name` stands for the file in its lines.

    `check` says what is wrong with a model that is well formed, as `field: what`.
    """
    data, lines = _load(text, name)
    try:
        found = model.model_validate(data)
    except ValidationError as error:
        problems = [dict(problem) for problem in error.errors(include_url=False)]
        raise SpecError("\n".join(dict.fromkeys(_told(name, lines, problems)))) from None
    if problem := check(found):
        raise SpecError(_placed(name, lines, (), problem))
    return found


def _load(text: str | bytes, name: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """The data, and the line of every key and item by its path."""
    if len(text) > MOST_BYTES:
        raise SpecError(f"{name}: {len(text)} bytes; expected at most {MOST_BYTES}")
    loader = None
    try:
        text = text.decode() if isinstance(text, bytes) else text
        _scan(text, name)
        loader = _Loader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except UnicodeDecodeError:
        raise SpecError(f"{name}: not a text file (UTF-8 expected)") from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # such as `!!bool maybe`
        raise SpecError(f"{name}: a value does not fit its tag: {type(error).__name__}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", "not YAML")
        raise SpecError(f"{name}{line}: not valid YAML: {what}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if node is None or not isinstance(data, dict):
        raise SpecError(
            f"{name}: expected keys and values, found {'nothing' if data is None else type(data).__name__}"
        )
    lines: dict[tuple[str, ...], int] = {}
    _note_lines(node, (), lines, name)
    return data, lines


def _scan(text: str, name: str) -> None:
    """Refuse what is dangerous to build or cannot be stored, before anything is built."""
    level = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        line = f"{name}:{token.start_mark.line + 1}"
        if isinstance(token, yaml.AliasToken):
            raise SpecError(f"{line}: YAML aliases (*name) are not accepted here; write the value out")
        level += isinstance(token, OPENING) - isinstance(token, CLOSING)
        if level > MOST_LEVELS:
            raise SpecError(f"{line}: nested too deeply; expected at most {MOST_LEVELS} levels")
        if isinstance(token, yaml.ScalarToken) and UNSTORABLE.search(token.value):
            raise SpecError(f"{line}: a text holds half a character (a surrogate) or NUL")


class _Loader(yaml.SafeLoader):
    """Leaves instants as text: YAML's own reading of them names no line when it fails."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (of the base class)
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _note_lines(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], name: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner, line = (*path, str(key.value)), key.start_mark.line + 1
            if inner in lines:  # YAML takes the last one in silence
                raise SpecError(_placed(name, {inner: line}, inner, f"given before, in line {lines[inner]}"))
            lines[inner] = line
            _note_lines(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(value, (*path, str(index)), lines, name)


def _told(name: str, lines: dict[tuple[str, ...], int], problems: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each problem. A list whose items are wrong is not short of items, as pydantic has it."""
    for problem in problems:
        inside = (other["loc"][: len(problem["loc"])] for other in problems if other is not problem)
        if problem["type"] != "too_short" or problem["loc"] not in inside:
            yield _problem(name, lines, problem)


def _problem(name: str, lines: dict[tuple[str, ...], int], problem: dict[str, Any]) -> str:
    where = tuple(str(part) for part in problem["loc"])
    context = problem.get("ctx", {})
    if problem["type"] == "missing":
        return _placed(name, lines, where, "missing; it is required")
    if problem["type"] == "unknown_key":
        return _placed(name, lines, (*where, context["key"]), problem["msg"])
    known = EXPECTED.get(problem["type"])
    said = known.format(**context) if known else problem["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(problem["input"], dict) else f"{problem['input']!r:.80}: "
    return _placed(name, lines, where, shown + said)


def _placed(name: str, lines: dict[tuple[str, ...], int], where: tuple[str, ...], said: str) -> str:
    """One line: file, line, field and what is said, which may begin with the name of the field."""
    field = re.match(r"(\w+): ", said)
    if field and (*where, field[1]) in lines:
        where, said = (*where, field[1]), said.removeprefix(field[0])
    near = where
    while near and near not in lines:  # a missing key, or a member of a union, has no line of its own
        near = near[:-1]
    path = ".".join(where)[:200] or "the file"
    return " ".join(f"{name}:{lines.get(near, 1)}: {path}: {said}".split())
