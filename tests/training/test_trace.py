"""Traces whose true shares are known: what hides is not counted, causes add up, late ranks are named."""

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from training.__main__ import main
from training.collectives import exposed_of_each
from training.diagnosis import cost_of, points, table, three_causes, words
from training.trace import CAUSES, Breakdown, TraceError, breakdown, compared, read, stragglers


def event(name: str, category: str, start: float, length: float, **arguments: Any) -> dict[str, Any]:
    """A complete event, in milliseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": 1e3 * start,
        "dur": 1e3 * length,
        "args": arguments,
    }


def a_step_on_a_gpu(at: float = 0.0, own: float = 60.0) -> list[dict[str, Any]]:
    """A step of 100 ms, with `own` as 60: 60 of matmuls, 10 of the optimizer, 5 of a copy, 20 of a collective
    of which half is hidden, 8 of waiting for data of which 5 are copied beside, 12 of nothing."""
    return [
        event("ProfilerStep#1", "user_annotation", at, 100),
        event("enumerate(DataLoader)#_Iter.__next__", "user_annotation", at, 8),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", at + 3, 5, correlation=1),
        event("gemm", "kernel", at + 10, own, correlation=2),
        event("ncclDevKernel_AllReduce", "kernel", at + own, 20, correlation=3),
        event("Optimizer.step#AdamW.step", "user_annotation", at + 20, 3),
        event("cudaLaunchKernel", "cuda_runtime", at + 21, 0.01, correlation=4),
        event("fused_adam", "kernel", at + own + 20, 10, correlation=4),
        event("ProfilerStep#1", "gpu_user_annotation", at + 10, 80),
    ]


def milliseconds(events: list[dict[str, Any]]) -> dict[str, float]:
    return {cause: round(1e3 * seconds, 6) for cause, seconds in breakdown(events, 0).seconds.items()}


def test_each_instant_of_a_gpus_step_has_one_cause() -> None:
    found = milliseconds(a_step_on_a_gpu())
    assert found == {
        "compute": 60,
        "optimizer": 10,
        "copies": 5,
        "communication": 10,
        "data": 3,
        "idle": 12,
    }


def test_communication_beside_computing_is_hidden_and_costs_nothing() -> None:
    assert breakdown(a_step_on_a_gpu(), 0).hidden_communication == pytest.approx(0.01)
    beside = [event("gemm", "kernel", 0, 50), event("ncclDevKernel_AllGather", "kernel", 10, 20)]
    assert milliseconds(beside)["communication"] == 0
    after = [event("gemm", "kernel", 0, 50), event("ncclDevKernel_AllGather", "kernel", 50, 20)]
    assert milliseconds(after)["communication"] == 20


def test_kernels_that_overlap_on_two_streams_are_counted_once() -> None:
    assert milliseconds([event("a", "kernel", 0, 30), event("b", "kernel", 20, 30)])["compute"] == 50


def test_time_between_profiled_steps_is_left_out() -> None:
    events = [*a_step_on_a_gpu(), *a_step_on_a_gpu(at=500)]
    found = breakdown(events, 0)
    assert found.steps == 2
    assert found.total == pytest.approx(0.2)


def test_the_last_kernels_belong_to_the_step_though_the_host_has_gone_on() -> None:
    events = [event("ProfilerStep#1", "user_annotation", 0, 10), event("gemm", "kernel", 5, 45)]
    assert milliseconds(events)["compute"] == 45


def test_ops_of_a_cpu_stand_for_kernels() -> None:
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("enumerate(DataLoader)#_Iter.__next__", "user_annotation", 0, 20),
        event("aten::stack", "cpu_op", 5, 10),  # collation, which is waiting for data
        event("aten::mm", "cpu_op", 20, 40),
        event("c10d::allreduce_", "cpu_op", 60, 1),
        event("gloo:all_reduce", "user_annotation", 55, 20),
        event("Optimizer.step#AdamW.step", "user_annotation", 75, 15),
        event("aten::_fused_adamw_", "cpu_op", 76, 13),
    ]
    found = milliseconds(events)
    assert found == {
        "compute": 40,
        "optimizer": 15,
        "copies": 0,
        "communication": 15,
        "data": 20,
        "idle": 10,
    }


def test_a_rank_that_the_others_wait_for_straggles() -> None:
    ranks = [breakdown(a_step_on_a_gpu(), rank) for rank in range(3)]
    assert stragglers(ranks) == []
    late = [event for event in a_step_on_a_gpu() if "nccl" not in event["name"]]
    late.append(event("gemm", "kernel", 70, 9))
    ranks.append(breakdown(late, 3))
    (rank, excess), *others = stragglers(ranks)
    assert (rank, others) == (3, [])
    assert excess == pytest.approx(0.01)
    assert any(line.startswith("rank 3 straggles: 10.00 ms of each step") for line in words(ranks))


def test_the_words_name_the_largest_cause_first_and_what_it_is_worth() -> None:
    events = [event("Memcpy HtoD", "gpu_memcpy", 0, 50), event("gemm", "kernel", 50, 50)]
    assert words([breakdown(events, 0)]) == [
        "host/device copies takes 50% of the step; without it the run is 2.00 × as fast: "
        "pin and copy one batch ahead (pinned: true, prefetch_batches: 1)"
    ]


def test_a_clean_run_gets_no_accusation() -> None:
    events = [event("gemm", "kernel", 0, 97), event("ncclDevKernel_AllGather", "kernel", 97, 3)]
    assert words([breakdown(events, 0)]) == ["nothing beside computing takes a twentieth of the step"]


def test_points_are_what_the_mfu_would_gain() -> None:
    assert points(0.2, 0.4) == pytest.approx(10)
    assert points(0.9, 0.4) == pytest.approx(60)  # no further than the peak


def write(file: Path, rank: int, events: list[dict[str, Any]]) -> Path:
    text = json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def test_the_command_gives_table_words_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path / "b.json", 1, a_step_on_a_gpu())]
    files.append(write(tmp_path / "a.json.gz", 0, a_step_on_a_gpu()))
    asked = ["diagnose", "--trace", *map(str, files), "--mfu", "0.4", "--svg", str(tmp_path / "bars.svg")]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ms", "a", "step", "rank", "0", "rank", "1", "share", "MFU", "points"]
    assert lines[4].split() == ["exposed", "communication", "10.00", "10.00", "10.0%", "4.4"]
    drawn = ElementTree.parse(tmp_path / "bars.svg").getroot()
    titles = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 * len(CAUSES)
    assert "rank 1: exposed communication 10" in titles


def test_machines_are_told_the_mfu_and_what_each_of_the_three_causes_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.json", 0, a_step_on_a_gpu())
    assert main(["diagnose", "--trace", str(file), "--mfu", "0.4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mfu"] == 0.4
    assert found["three_causes_mfu_points"] == three_causes(read([file]), 0.4)
    assert main(["diagnose", "--trace", str(file), "--json"]) == 0
    assert "three_causes_mfu_points" not in json.loads(capsys.readouterr().out), "the MFU is not known"


@pytest.mark.parametrize(
    "options", [("--levers", "sync"), ("--no-levers",), ("--processes", "2")], ids=lambda options: options[0]
)
def test_nothing_is_run_beside_a_trace(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.json", 0, a_step_on_a_gpu())
    assert main(["diagnose", "--trace", str(file), *options]) == 2
    said = "--trace: a trace is read, nothing is run; expected no --processes, --levers or --no-levers"
    assert capsys.readouterr().err == f"training: {said}\n"


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / name, 0, a_step_on_a_gpu()) for name in ("a.json", "b.json")]
    with pytest.raises(TraceError, match="two traces are of the same rank"):
        read(files)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not a Chrome trace"),
        (b"\x1f\x8bxx", "not a Chrome trace"),
        (b"[1, 2]", "no kernels and no CPU ops"),
        (b'{"other": 1}', "not a Chrome trace: it has no traceEvents"),
        (b"", "not a Chrome trace: Expecting value"),
        (b"[" * 100_000, "not a Chrome trace: maximum recursion depth"),
        (gzip.compress(b"[" * 999, mtime=0)[:-9], "not a Chrome trace: Compressed file ended before"),
        (json.dumps([event("k" * 99, "other", 1, 1)]).encode(), "no kernels and no CPU ops"),
        (b'[{"ph": "X", "name": "mm", "dur": 1}]', "ts of event 'mm': None; expected microseconds"),
        (b'[{"ph": "X", "name": "mm", "ts": 1, "dur": NaN}]', "dur of event 'mm': nan; expected micro"),
        (
            json.dumps([event("ProfilerStep#1", "a", 0, 1), event("mm", "kernel", -9, 1)]).encode(),
            "no work inside its 1 ProfilerSteps",
        ),
    ],
)
def test_what_is_no_trace_is_one_line(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_bytes(content)
    assert main(["diagnose", "--trace", str(tmp_path / "t.json")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_trace_may_have_other_line_ends_and_be_a_bare_list_and_have_arguments_of_any_kind(
    tmp_path: Path,
) -> None:
    odd = [*a_step_on_a_gpu(), {**event("x" * 10_000, "kernel", 10, 1), "args": None}]
    odd.append(event("cudaLaunchKernel", "cuda_runtime", 21, 0.01, correlation=[4]))
    text = json.dumps(odd, indent=1).replace("\n", "\r\n")
    (tmp_path / "t.json").write_bytes(text.encode())
    (found,) = read([tmp_path / "t.json"])
    assert {cause: round(1e3 * part, 6) for cause, part in found.seconds.items()} == milliseconds(
        a_step_on_a_gpu()
    )


def test_ranks_with_other_numbers_of_steps_are_compared_by_the_step(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.json", 0, a_step_on_a_gpu())]
    files.append(write(tmp_path / "b.json", 1, [*a_step_on_a_gpu(), *a_step_on_a_gpu(at=500)]))
    ranks = read(files)
    assert [one.steps for one in ranks] == [1, 2]
    assert stragglers(ranks) == []
    assert cost_of(ranks, "communication") == pytest.approx(0.1)


def test_a_gpu_is_not_compared_with_a_processor(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.json", 0, a_step_on_a_gpu())]
    files.append(write(tmp_path / "b.json", 1, [event("aten::mm", "cpu_op", 0, 9)]))
    with pytest.raises(TraceError, match=r"b\.json: of a cpu, .* of a cuda; expected one kind"):
        read(files)


def exchanging(rank: int, *lengths: float) -> Breakdown:
    """Steps of 100 ms, each with a reduce-scatter that takes so long, and ends with its step."""
    events = []
    for step, each in enumerate(lengths):
        start = 100 * step
        events += [
            event(f"ProfilerStep#{step}", "user_annotation", start, 100),
            event("gemm", "kernel", start, 100 - each),
            event("ncclDevKernel_ReduceScatter", "kernel", start + 100 - each, each),
        ]
    return breakdown(events, rank)


def test_waiting_for_another_rank_is_no_cost_of_communication() -> None:
    """The ranks are late in turn: each spends much in collectives, though an exchange takes 2 ms."""
    ranks = compared([exchanging(0, 2, 32, 2, 32), exchanging(1, 32, 2, 32, 2)])
    assert [one.exchange for one in ranks] == pytest.approx([0.008, 0.008])
    assert cost_of(ranks, "communication") == pytest.approx(0.02)
    assert words(ranks) == ["nothing beside computing takes a twentieth of the step"]
    assert table(ranks)[-1].split()[:6] == ["waiting", "for", "a", "rank", "15.00", "15.00"]
    costs = three_causes(ranks, 0.8)
    assert costs["communication"] == pytest.approx(points(0.02, 0.8))
    assert costs["unfilled hardware"] > 10


def test_a_step_in_which_the_machine_stuttered_is_no_cost_of_communication() -> None:
    ranks = compared([exchanging(0, 2, 2, 60, 2), exchanging(1, 2, 2, 60, 2)])
    assert cost_of(ranks, "communication") == pytest.approx(0.02)


def test_exchanges_that_all_ranks_spend_long_in_are_named() -> None:
    ranks = compared([exchanging(0, 20, 30), exchanging(1, 30, 20)])
    assert cost_of(ranks, "communication") == pytest.approx(0.2)
    assert words(ranks)[0].startswith("exposed communication takes 20% of the step")


def test_collectives_under_way_together_share_the_time_between_them() -> None:
    """As on gloo, which has begun the second before the first ends."""
    both = [event("a", "kernel", 0, 30), event("b", "kernel", 10, 40)]
    found = exposed_of_each(both, [(0.0, 20e3), (40e3, 50e3)], [(0.0, 50e3)])
    assert [(step, name) for step, name, _ in found] == [(0, "a"), (0, "b")]
    assert [seconds for *_, seconds in found] == pytest.approx([0.02, 0.01])


def test_a_slow_loader_in_a_real_trace_is_the_first_thing_said(tmp_path: Path) -> None:
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile, schedule
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.02)
            return torch.ones(64)

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(DataLoader(Slow(), batch_size=4))
    how = schedule(wait=0, warmup=1, active=3, repeat=1)

    def keep(done: profile) -> None:
        done.export_chrome_trace(str(tmp_path / "real.json"))

    with profile(activities=[ProfilerActivity.CPU], schedule=how, on_trace_ready=keep) as profiler:
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    (found,) = read([tmp_path / "real.json"])
    assert found.steps == 3
    assert found.seconds["data"] >= 3 * 4 * 0.02
    assert found.seconds["optimizer"] > 0
    assert found.seconds["compute"] > 0
    assert words([found])[0].startswith("waiting for data takes")
