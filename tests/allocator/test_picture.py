"""What a person sees of a plan: the terminal grid, also without colour, and the SVG drawing."""

import io
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from allocator import Plan, Problem, solve
from allocator.check import score
from allocator.drawing import svg
from allocator.generate import generate
from allocator.picture import colours, figures, grid, holders, show
from allocator.plan import Placement, ServicePlan, Unplaced

SPACE = "{http://www.w3.org/2000/svg}"


def site(**fields: object) -> Problem:
    """Two nodes of four GPUs, six slots, a job of each kind, a service and a hole."""
    data = {
        "name": "site",
        "slots": 6,
        "nodes": [{"name": "north", "gpus": 4, "gpu": "H100"}, {"name": "south", "gpus": 4}],
        "realtime": [{"service": "chat", "demand": [1, 1, 2, 2, 1, 1], "ramp": 4}],
        "jobs": [
            {"id": "tune", "kind": "training", "gpus": 4, "slots": 3, "priority": 2},
            {"id": "scan", "kind": "batch_inference", "gpus": 2, "slots": 2, "priority": 1},
            {"id": "trim", "kind": "quantization", "gpus": 1, "slots": 2, "priority": 1},
            {"id": "late", "kind": "training", "gpus": 8, "slots": 6, "priority": 1},
        ],
        "unavailable": [{"gpus": [4], "from": 0, "to": 2}],
    }
    return Problem.from_dict(data | fields)


def plan(problem: Problem) -> Plan:
    """Made by hand, so that the picture does not hang on a solver."""
    draft = Plan(
        mode="fast",
        solve_ms=1.25,
        objective=30,
        bound=None,
        value=30,
        utilization=0,
        placements=(
            Placement("tune", 0, 3, (0, 1, 2, 3)),
            Placement("scan", 3, 2, (0, 1)),
            Placement("trim", 2, 2, (4,)),
        ),
        realtime=(ServicePlan("chat", ((7,), (7,), (6, 7), (6, 7), (7,), (7,)), (0, 0, 0, 0, 0, 0)),),
        unplaced=(Unplaced("late", "no room [yet]", 9),),
    )
    found = score(problem, draft)
    return Plan(
        **{name: getattr(draft, name) for name in Plan.__slots__}
        | {"objective": found.objective, "value": found.value, "utilization": found.utilization}
    )


def shown(problem: Problem, made: Plan, width: int = 100, committed: int = 1, **options: int) -> list[str]:
    """The lines of the grid as a terminal without colour gets them."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, force_terminal=False)
    console.print(grid(problem, made, width=width, committed=committed, **options))
    return out.getvalue().splitlines()


def test_holders_are_what_the_plan_says() -> None:
    problem = site()
    rows = holders(problem, plan(problem))
    names = ["".join((cell.name or cell.sort)[:2] if cell else "··" for cell in row) for row in rows]
    assert names[0] == "tututuscsc··"
    assert names[2] == "tututu······"
    assert names[4] == "ououtrtr····"
    assert names[6] == "····chch····"
    assert names[7] == "chchchchchch"


def test_each_job_is_named_once_and_rows_that_are_alike_are_shown_once() -> None:
    problem = site()
    lines = shown(problem, plan(problem))
    text = "\n".join(lines)
    assert [text.count(name) for name in ("tune", "scan", "trim", "late")] == [1, 1, 1, 0]
    assert any(line.startswith("north H100 0–1 ") for line in lines)
    assert any(line.startswith("           2–3 ") for line in lines)
    assert any(line.startswith("south 4 ") for line in lines)


def test_without_colour_idle_out_of_service_and_realtime_cells_differ() -> None:
    problem = site()
    lines = shown(problem, plan(problem))
    (hole,) = [line for line in lines if line.startswith("south 4 ")]
    assert "××××××××▏trim~~~········" in hole
    (idle,) = [line for line in lines if line.split()[0] == "5"]
    assert idle.endswith("·" * 24)
    assert "╱chat╱" in "\n".join(lines)
    legend = " ".join(lines[-2:])
    for word in ("training", "batch_inference", "quantization", "real-time", "out of service", "idle"):
        assert word in legend


def test_kinds_have_their_own_fill_without_colour() -> None:
    problem = site()
    text = "\n".join(shown(problem, plan(problem)))
    assert "▏tune───────" in text
    assert "▏scan═══" in text
    assert "▏trim~~~" in text


@pytest.mark.parametrize("committed", [0, 1, 3, 9])
def test_the_committed_slots_are_marked_in_the_header(committed: int) -> None:
    problem = site()
    marks = shown(problem, plan(problem), committed=committed)[1]
    assert marks.count("━") == 4 * min(committed, 6)
    assert marks.count("┄") == 24 - marks.count("━")


def test_work_that_began_before_and_work_that_ends_after_the_horizon_is_marked() -> None:
    problem = site(
        open_end=True,
        jobs=[
            {"id": "old", "gpus": 1, "slots": 5, "running": {"start": -2, "gpus": [0]}},
            {"id": "long", "gpus": 1, "slots": 9},
        ],
        realtime=[],
    )
    made = Plan("fast", 0, 0, None, 0, 0, (Placement("old", -2, 5, (0,)), Placement("long", 1, 9, (1,))))
    lines = shown(problem, made)
    assert any("◂old───────" in line and "▸" not in line for line in lines)
    assert any("▏long" in line and line.rstrip().endswith("▸") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_long_horizon_is_folded_to_the_width(width: int) -> None:
    problem = generate(1, gpus=16, jobs=20, slots=288, features=("running",))
    lines = shown(problem, solve(problem, "greedy"), width=width)
    assert all(len(line) <= width for line in lines)
    assert re.search(r"a\s+column\s+is\s+\d+\s+slots", " ".join(lines))


def test_a_large_cluster_is_shown_by_nodes_with_how_full_they_are() -> None:
    problem = generate(1, gpus=1024, jobs=600, node_gpus=8, features=())
    made = solve(problem, "greedy")
    lines = shown(problem, made, width=120)
    assert len(lines) < 60
    assert lines[2].startswith("node0–node3 ")
    assert "height the share of the GPUs in use" in " ".join(" ".join(lines).split())


def test_one_large_node_is_shown_in_bands() -> None:
    problem = generate(2, gpus=512, jobs=300, node_gpus=512, features=())
    lines = shown(problem, solve(problem, "greedy"), width=120)
    assert len(lines) < 60
    assert lines[2].startswith("0–12 ")


def test_figures_say_how_far_the_plan_may_be_from_the_best() -> None:
    problem = site()
    made = plan(problem)
    assert "best" not in figures(problem, made)
    values = {name: getattr(made, name) for name in Plan.__slots__}
    near = Plan(**values | {"bound": made.objective * 1.25})
    assert "at most 20.00 % below the best" in figures(problem, near)
    assert "proven best" in figures(problem, Plan(**values | {"bound": made.objective}))


def test_everything_about_a_plan_is_printed_and_brackets_are_not_markup() -> None:
    problem = site()
    out = io.StringIO()
    made = plan(problem)
    values = {name: getattr(made, name) for name in Plan.__slots__}
    show(
        Console(file=out, width=120, no_color=True),
        problem,
        Plan(**values | {"warnings": ("service chat: lost [7]",)}),
    )
    text = out.getvalue()
    assert text.startswith("site, fast: objective 30 ")
    assert "3 of 4 jobs" in text
    assert re.search(r"late +8×6 +48 +slot 9 +no room \[yet\]", text)
    assert "warning: service chat: lost [7]" in text


def test_kinds_that_are_not_ours_get_colours_of_their_own() -> None:
    jobs = [{"id": kind, "kind": kind, "gpus": 1, "slots": 1} for kind in ("render", "fold", "training")]
    found = colours(site(jobs=jobs))
    assert len(set(found.values())) == 3


# The drawing


def drawn(problem: Problem, made: Plan, committed: int = 1) -> ElementTree.Element:
    return ElementTree.fromstring(svg(problem, made, committed=committed))


def titled(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [
        rect
        for rect in root.iter(f"{SPACE}rect")
        for title in rect.iter(f"{SPACE}title")
        if (title.text or "").startswith(name)
    ]


def test_each_job_is_a_rectangle_of_its_kinds_colour_with_a_title() -> None:
    problem = site()
    root = drawn(problem, plan(problem))
    for name, kind in (("tune", "training"), ("scan", "batch_inference"), ("trim", "quantization")):
        (rect,) = titled(root, f"{name} ({kind})")
        assert rect.get("fill") == colours(problem)[kind]
    assert not titled(root, "late")


def test_realtime_is_hatched_and_covers_its_gpu_slots() -> None:
    problem = site()
    root = drawn(problem, plan(problem))
    rects = titled(root, "chat")
    assert {rect.get("fill") for rect in rects} == {"url(#hatch0)"}
    assert root.find(f".//{SPACE}pattern[@id='hatch0']") is not None
    area = sum(float(rect.get("width", 0)) * float(rect.get("height", 0)) for rect in rects)
    assert area == pytest.approx(8 * 44 * 22, rel=0.01)


def test_out_of_service_and_the_committed_slot_are_marked_and_the_legend_names_all() -> None:
    problem = site()
    root = drawn(problem, plan(problem))
    (hole,) = titled(root, "out of service")
    assert hole.get("fill") == "url(#cross)"
    words = [text.text for text in root.iter(f"{SPACE}text")]
    for word in ("training", "batch_inference", "quantization", "chat (real-time)", "out of service"):
        assert word in words
    assert "idle" in words and "committed" in words
    dashed = [path for path in root.iter(f"{SPACE}path") if path.get("stroke-dasharray")]
    assert [path.get("d", "").split(",")[0] for path in dashed] == ["M164"]  # 120 + one slot of 44
    assert not [p for p in drawn(problem, plan(problem), 0).iter(f"{SPACE}path") if p.get("stroke-dasharray")]


def test_a_gang_on_nodes_apart_is_a_rectangle_on_each() -> None:
    nodes = [{"name": f"n{k}", "gpus": 2} for k in range(3)]
    problem = site(nodes=nodes, jobs=[{"id": "gang", "gpus": 4, "slots": 2}], realtime=[], unavailable=[])
    made = Plan("fast", 0, 0, None, 0, 0, (Placement("gang", 0, 2, (0, 1, 4, 5)),))
    assert len(titled(drawn(problem, made), "gang")) == 2


def test_names_are_escaped() -> None:
    problem = site(name="a<b>&'c'", jobs=[{"id": "x<&>", "gpus": 4, "slots": 6}], realtime=[], unavailable=[])
    made = Plan("fast", 0, 0, None, 0, 0, (Placement("x<&>", 0, 6, (0, 1, 2, 3)),))
    root = drawn(problem, made)
    words = [text.text for text in root.iter(f"{SPACE}text")]
    assert "a<b>&'c', fast" in words
    assert "x<&>" in words


@pytest.mark.parametrize(("gpus", "slots"), [(16, 24), (64, 288), (1024, 24)])
def test_a_drawing_is_well_formed_at_any_size(gpus: int, slots: int) -> None:
    problem = generate(
        3, gpus=gpus, slots=slots, jobs=60, node_gpus=8, features=("running", "holes", "services")
    )
    root = drawn(problem, solve(problem, "greedy"))
    assert float(root.get("width", 0)) <= 1200
    assert float(root.get("height", 0)) <= 2400
