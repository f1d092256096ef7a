"""The cluster file: what is read, and what its author is told."""

from pathlib import Path

import pytest
import yaml

from tasks.cluster import load_site
from tasks.specfile import SpecError
from tests.conftest import make_site

GOOD = """\
name: lab
nodes:
- {name: node0, gpus: 8, gpu: H100}
services:
- name: chat
  demand: {file: load.csv}
  expected_gpus: 2
  ramp_per_hour: 4
  priority: 8
"""


def told(tmp_path: Path, old: str, new: str) -> str:
    """What the author of the good file is told after this change to it."""
    assert old in GOOD
    file = tmp_path / "cluster.yaml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(SpecError) as error:
        load_site(file)
    return str(error.value).replace(f"{file}:", "cluster.yaml:")


def test_a_short_file_has_sensible_defaults(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(GOOD)
    site = load_site(tmp_path / "cluster.yaml")
    assert (site.plan_slots, site.season_slots) == (144, 144)  # a day of ten minutes
    assert site.lost_after.total_seconds() == 40
    assert site.storage_root == str(tmp_path / ".slotwise" / "storage")
    assert site.state == tmp_path / ".slotwise"
    assert site.cluster.time_zone == "UTC"


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_site(tmp_path / "conf", storage="file:../data", state="/var/lib/slotwise")
    monkeypatch.chdir(tmp_path)
    site = load_site("conf/cluster.yaml")
    assert Path(site.storage_root).resolve() == tmp_path.resolve() / "data"
    assert site.state == Path("/var/lib/slotwise")


def test_storage_that_is_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    assert told(tmp_path, "name: lab", "name: lab\nstorage: file:afile") == (
        f"cluster.yaml:2: storage: 'file:afile': {tmp_path}/afile is a file; "
        "expected a directory, or a name that is free"
    )


def test_storage_may_be_a_bucket(tmp_path: Path) -> None:
    assert make_site(tmp_path, storage="s3://bucket/some/prefix").storage_root == "s3://bucket/some/prefix"


def test_gpus_are_numbered_over_the_nodes_in_file_order(tmp_path: Path) -> None:
    site = make_site(tmp_path, nodes=[{"name": "b", "gpus": 2}, {"name": "a", "gpus": 1}])
    assert [(number, node.name, index) for number, node, index in site.gpu_numbers()] == [
        (0, "b", 0),
        (1, "b", 1),
        (2, "a", 0),
    ]


MISTAKES = [
    ("gpus: 8", "gpu_s: 8", "cluster.yaml:3: nodes.0.gpu_s: unknown key; did you mean gpus?"),
    ("gpus: 8", "gpus: 0", "cluster.yaml:3: nodes.0.gpus: 0: expected at least 1"),
    ("name: node0", "name: ../x", "cluster.yaml:3: nodes.0.name: '../x': expected letters, digits, "
     "'.', '_' and '-', beginning with a letter or digit"),
    ("name: node0", f"name: {'n' * 64}", f"cluster.yaml:3: nodes.0.name: '{'n' * 64}': "
     "expected at most 63 characters"),
    ("name: lab", "name: lab\ntime_zone: Mars", "cluster.yaml:2: time_zone: 'Mars': expected a time zone "
     "such as UTC or Europe/Berlin"),
    ("name: lab", "name: lab\nstorage: gs://x", "cluster.yaml:2: storage: 'gs://x': expected file:DIRECTORY "
     "or s3://bucket/prefix"),
    ("name: lab", "name: lab\nstorage: 'file:'", "cluster.yaml:2: storage: 'file:': expected file:DIRECTORY "
     "or s3://bucket/prefix"),
    ("name: lab", "name: lab\nslot_minutes: 61", "cluster.yaml:2: slot_minutes: 61: expected at most 60"),
    ("name: lab", "name: lab\nslot_minutes: 7\nplan_every_minutes: 60", "cluster.yaml:3: plan_every_minutes: "
     "60 is neither a multiple nor a divisor of slot_minutes: 7"),
    ("name: lab", "name: lab\nnodes: []", "cluster.yaml:3: nodes: given before, in line 2; expected once"),
    ("priority: 8", "priority: .inf", "cluster.yaml:9: services.0.priority: inf: expected a finite number"),
    ("ramp_per_hour: 4", "ramp_per_hour: 0", "cluster.yaml:8: services.0.ramp_per_hour: 0: "
     "expected more than 0"),
    ("file: load.csv", "unit: gpus", "cluster.yaml:6: services.0.demand: "
     "expected either file: or prometheus: (with query:)"),
    ("file: load.csv", "prometheus: 'http://p'", "cluster.yaml:6: services.0.demand.prometheus: "
     "needs query:"),
    ("file: load.csv", "file: a, unit: gpu", "cluster.yaml:6: services.0.demand.unit: 'gpu': "
     "expected 'requests_per_s' or 'gpus'"),
    ("priority: 8", "priority: 8\n  latency: {target_s: 1, service_s: 2}", "cluster.yaml:10: "
     "services.0.latency.target_s: 1 is below service_s: 2; expected more"),
    ("priority: 8", "priority: 8\n  latency: {target_s: 3, service_s: 2}\n  requests_per_gpu_hour: 9",
     "cluster.yaml:10: services.0.latency: expected either this or requests_per_gpu_hour"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line"), MISTAKES, ids=[new[:40] for _, new, _ in MISTAKES])
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert told(tmp_path, old, new) == line


def test_names_are_unique(tmp_path: Path) -> None:
    node = yaml.safe_dump(
        [{"name": "node0", "gpus": 1}, {"name": "node0", "gpus": 1}], default_flow_style=True
    )
    line = told(tmp_path, "nodes:\n- {name: node0, gpus: 8, gpu: H100}", f"nodes: {node.strip()}")
    assert line == "cluster.yaml:1: the file: two nodes are named node0; names are unique"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"missing\.yaml: cannot be read: No such file"):
        load_site(tmp_path / "missing.yaml")


EXAMPLES = sorted((Path(__file__).parents[2] / "deployments").rglob("*.yaml"))
EXAMPLES = [file for file in EXAMPLES if "\nnodes:" in file.read_text()]


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.name for file in EXAMPLES])
def test_the_examples_can_be_read(file: Path) -> None:
    assert load_site(file).cluster.nodes
