"""What people are told when their YAML cannot be used: the file, the line, the field, what was expected."""

import pytest

from tasks.specfile import MOST_BYTES, SpecError, Strict, read_spec


class Part(Strict):
    size: int
    tags: tuple[str, ...] = ()


class Whole(Strict):
    title: str
    count: int = 1
    weight: float = 1.0
    parts: tuple[Part, ...] = ()
    extra: Part | None = None


def told(text: str | bytes) -> str:
    """The one line that a file with this text earns its author."""
    with pytest.raises(SpecError) as error:
        read_spec(Whole, text, "w.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_good_file_is_read() -> None:
    text = "title: a\nparts:\n- {size: 2, tags: [x]}\n- size: 3\n"
    assert read_spec(Whole, text, "w.yaml") == Whole(
        title="a", parts=(Part(size=2, tags=("x",)), Part(size=3))
    )


LINES = {
    "title: a\ncuont: 2": "w.yaml:2: cuont: unknown key; did you mean count?",
    "title: a\nzzz: 2": "w.yaml:2: zzz: unknown key; expected one of title, count, weight, parts, extra",
    "title: a\nparts:\n- size: 1\n- size: 2\n  tag: [x]": (
        "w.yaml:5: parts.1.tag: unknown key; did you mean tags?"
    ),
    "# note\n\ncount: 2": "w.yaml:3: title: missing; it is required",
    "title: a\nparts:\n- size: 1\n- tags: []": "w.yaml:4: parts.1.size: missing; it is required",
    "title: a\n\nextra:\n  tags: [x]": "w.yaml:3: extra.size: missing; it is required",
    "title: 5": "w.yaml:1: title: 5: expected a text; put it in quotes",
    "title: a\ncount: many": "w.yaml:2: count: 'many': expected a whole number",
    "title: a\ncount: 1.5": "w.yaml:2: count: 1.5: expected a whole number",
    "title: a\ncount: yes": (
        "w.yaml:2: count: True: expected a number or a text; put yes, no, on and off in quotes"
    ),
    "title: a\nweight: [1]": "w.yaml:2: weight: [1]: expected a number",
    "title: a\nparts: {size: 1}": "w.yaml:2: parts: expected a list",
    "title: a\nparts:\n- 7": "w.yaml:3: parts.0: 7: expected keys and values",
    "title: a\nparts:\n- size: 1\n  tags:\n  - ok\n  - 2026": (
        "w.yaml:6: parts.0.tags.1: 2026: expected a text; put it in quotes"
    ),
    "title: a\ntitle: b": "w.yaml:2: title: given before, in line 1; expected once",
    "title: a\nextra:\n  size: 1\n  size: 2": "w.yaml:4: extra.size: given before, in line 3; expected once",
    "title: a\n  count: 2": "w.yaml:2: not valid YAML: mapping values are not allowed here",
    "title: [a": "w.yaml:1: not valid YAML: expected ',' or ']', but got '<stream end>'",
    "title: !!python/name:os.system x": (
        "w.yaml:1: not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/name:os.system'"
    ),
    "title: !!bool maybe": "w.yaml: a value does not fit its tag: KeyError: 'maybe'",
    "title: !!int ''": "w.yaml: a value does not fit its tag: IndexError: string index out of range",
    "": "w.yaml:1: expected keys and values, found nothing",
    "# only a comment": "w.yaml:1: expected keys and values, found nothing",
    "just words": "w.yaml:1: expected keys and values, found 'just words'",
    "- a\n- b": "w.yaml:1: expected keys and values, found ['a', 'b']",
    "title: &x a\nparts: [*x]": "w.yaml:2: YAML aliases (*name) are not accepted here; write the value out",
    "title: a\n---\ntitle: b": "w.yaml:2: not valid YAML: but found another document",
    'title: a\n"two\\nlines": 1': (
        "w.yaml:2: two lines: unknown key; expected one of title, count, weight, parts, extra"
    ),
    'title: a\n"\\ud800": 1': "w.yaml:2: a text holds half a character (a surrogate) or NUL",
    'title: a\nparts: ["\\0"]': "w.yaml:2: a text holds half a character (a surrogate) or NUL",
    f"title: a\nextra: {'[' * 20_000}": "w.yaml:2: nested too deeply; expected at most 50 levels",
    "extra:\n" + "".join(" " * level + "-\n" for level in range(1, 60)): (
        "w.yaml:51: nested too deeply; expected at most 50 levels"
    ),
}


@pytest.mark.parametrize(("text", "line"), LINES.items(), ids=[repr(text)[:40] for text in LINES])
def test_a_mistake_is_named_with_its_line(text: str, line: str) -> None:
    assert told(text) == line


def test_every_problem_has_a_line_of_its_own() -> None:
    with pytest.raises(SpecError) as error:
        read_spec(Whole, "count: x\nweight: y\n", "w.yaml")
    assert str(error.value).splitlines() == [
        "w.yaml:1: title: missing; it is required",
        "w.yaml:1: count: 'x': expected a whole number",
        "w.yaml:2: weight: 'y': expected a number",
    ]


def test_an_unknown_key_hides_no_other_problem() -> None:
    with pytest.raises(SpecError) as error:
        read_spec(Whole, "tittle: a\nextra: {sise: 1}\nweight: y\n", "w.yaml")
    assert str(error.value).splitlines() == [
        "w.yaml:1: tittle: unknown key; did you mean title?",
        "w.yaml:2: extra.sise: unknown key; did you mean size?",
        "w.yaml:3: weight: 'y': expected a number",
    ]


def test_what_a_check_finds_has_the_line_of_its_field() -> None:
    with pytest.raises(SpecError, match=r"\Aw\.yaml:2: count: 3 is odd\Z"):
        read_spec(Whole, "title: a\ncount: 3\n", "w.yaml", lambda found: f"count: {found.count} is odd")


def test_long_values_are_cut_short() -> None:
    assert len(told(f"title: a\ncount: {'x' * 5000}")) < 200
    assert len(told(f"title: a\n{'x' * 900}: 1")) < 400


def test_a_file_that_is_too_large_is_not_looked_at() -> None:
    assert told("#" * (MOST_BYTES + 1)) == f"w.yaml: {MOST_BYTES + 1} bytes; expected at most {MOST_BYTES}"


@pytest.mark.parametrize("content", [b"title: \xff\xfe", b"\x00\x01\x02", b"\xff\xfet\x00i\x00"])
def test_a_file_that_is_no_text_is_refused(content: bytes) -> None:
    assert told(content).startswith("w.yaml:1: b'\\xff': not a text file") or content.startswith(b"\x00")


def test_an_instant_stays_the_text_that_was_written() -> None:
    assert read_spec(Whole, "title: 2026-12-01T06:00Z", "w.yaml").title == "2026-12-01T06:00Z"
