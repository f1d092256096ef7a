"""Read a YAML file that a person wrote into a pydantic model, and say what is wrong in that person's terms.

Invariant: a problem in the file ends in one SpecError whose lines each name the file, the line, the field,
the value and what was expected. YAML is read with `safe_load` semantics, at most 256 KiB, without aliases (an
alias can make a small file expand without end) and not deeply nested (its parser takes quadratic time); an
instant stays the text that was written, for its field to read.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

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

    @field_validator("*", mode="before")
    @classmethod
    def _no_flags(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes, no, on and off as truth values, which Python takes for 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected a number or a text; put yes, no, on and off in quotes")
        return value


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
        raise SpecError("\n".join(_told(model, name, lines, error))) from None
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
    except UnicodeDecodeError as error:
        at = error.object[: error.start].count(b"\n") + 1
        torn = error.object[error.start : error.end]
        raise SpecError(f"{name}:{at}: {torn!r}: not a text file; expected UTF-8") from None
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
        at, found = (node.start_mark.line + 1, f"{data!r:.80}") if node is not None else (1, "nothing")
        raise SpecError(f"{name}:{at}: expected keys and values, found {found}")
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
                said = f"given before, in line {lines[inner]}; expected once"
                raise SpecError(_placed(name, {inner: line}, inner, said))
            lines[inner] = line
            _note_lines(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(value, (*path, str(index)), lines, name)


def _told(
    model: type[BaseModel], name: str, lines: dict[tuple[str, ...], int], error: ValidationError
) -> list[str]:
    """A line for each problem, in the file's order."""
    problems = error.errors(include_url=False)
    meant = {  # a misspelt key is one mistake, not two
        (*problem["loc"][:-1], near)
        for problem in problems
        if problem["type"] == "extra_forbidden" and (near := _nearest_key(model, problem["loc"]))
    }
    told = {}
    for problem in problems:
        where = tuple(str(part) for part in problem["loc"])
        inside = (other["loc"][: len(where)] for other in problems if other is not problem)
        if problem["type"] == "too_short" and problem["loc"] in inside:
            continue  # a list whose items are wrong is not short of items, as pydantic has it
        if problem["type"] == "missing" and problem["loc"] in meant:
            continue
        told[_placed(name, lines, where, _said(model, problem))] = lines.get(_nearest(lines, where), 1)
    return sorted(told, key=lambda line: told[line])


def _said(model: type[BaseModel], problem: ErrorDetails) -> str:
    """The value that is wrong, and what was expected."""
    if problem["type"] == "missing":
        return "missing; it is required"
    if problem["type"] == "extra_forbidden":  # its value is not shown: nobody knows that it is no secret
        near = _nearest_key(model, problem["loc"])
        known_keys = ", ".join(_model_at(model, problem["loc"][:-1]).model_fields)
        return f"unknown key; {f'did you mean {near}?' if near else f'expected one of {known_keys}'}"
    shown = "" if isinstance(problem["input"], dict) else f"{problem['input']!r:.80}: "
    known = EXPECTED.get(problem["type"])
    said = known.format(**problem.get("ctx", {})) if known else problem["msg"].removeprefix("Value error, ")
    return shown + said


def _nearest_key(model: type[BaseModel], where: tuple[str | int, ...]) -> str | None:
    """The known key that an unknown one is most like."""
    near = difflib.get_close_matches(
        str(where[-1]), list(_model_at(model, where[:-1]).model_fields), n=1, cutoff=0.5
    )
    return near[0] if near else None


def _model_at(model: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel]:
    """The model that describes what lies at the path: parts that are no field are places in a list."""
    for part in path:
        if part in model.model_fields:
            model = next(_models(model.model_fields[str(part)].annotation), model)
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _nearest(lines: dict[tuple[str, ...], int], where: tuple[str, ...]) -> tuple[str, ...]:
    """Where it is, or would be: a missing key, or a member of a union, has no line of its own."""
    while where and where not in lines:
        where = where[:-1]
    return where


def _placed(name: str, lines: dict[tuple[str, ...], int], where: tuple[str, ...], said: str) -> str:
    """One line: file, line, field and what is said, which may begin with the name of the field."""
    field = re.match(r"(\w+): ", said)
    if field and (*where, field[1]) in lines:
        where, said = (*where, field[1]), said.removeprefix(field[0])
    path = ".".join(where)[:200] or "the file"
    return " ".join(f"{name}:{lines.get(_nearest(lines, where), 1)}: {path}: {said}".split())
