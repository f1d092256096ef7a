"""The command line of the forecast: what it reads, what it writes, what it says of mistakes."""

import json
import math
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from tasks.forecast_command import evaluate, forecasts, main, read_series
from tasks.forecast_training import SERIES, Examples, examples, train
from tasks.forecast_training import read_series as recorded_services

BEGIN = datetime(2026, 11, 2)
LOAD = [
    round(5 + 3 * math.sin(hour / 24 * 2 * math.pi) + random.Random(hour).uniform(-1, 1), 4)
    for hour in range(24 * 8)
]


def lines_of(load: list[float], minutes: int = 60) -> list[str]:
    return [f"{BEGIN + index * timedelta(minutes=minutes)},{value}" for index, value in enumerate(load)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(["ts,y", *lines]) + "\n")
    return path


@pytest.fixture
def series(tmp_path: Path) -> Path:
    return write(tmp_path / "load.csv", lines_of(LOAD))


def predicted(series: Path, *options: str) -> list[dict[str, Any]]:
    out = series.with_suffix(".json")
    main(["predict", str(series), "--json", str(out), *options])
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def test_predict_writes_the_last_origins_that_have_true_values_after_them(series: Path) -> None:
    found = predicted(series, "--origins", "5")
    assert [one["origin"] for one in found] == [
        f"{BEGIN + timedelta(hours=len(LOAD) - 24 - back)}" for back in (4, 3, 2, 1, 0)
    ]
    rows = np.array([one["quantiles"] for one in found])
    assert rows.shape == (5, 24, 3)
    assert (np.diff(rows, axis=2) >= 0).all()


def test_a_forecast_is_made_strictly_from_what_came_before(series: Path, tmp_path: Path) -> None:
    """Another future, from the first of the origins on, changes the first forecast in nothing."""
    first = len(LOAD) - 24 - 2
    other = write(tmp_path / "other.csv", lines_of([*LOAD[:first], *[99.0] * (len(LOAD) - first)]))
    options = ("--origins", "3", "--quantiles", "0.05,0.5,0.83,0.99")
    (mine, *_), (theirs, *_) = predicted(series, *options), predicted(other, *options)
    assert mine == theirs


def test_disorder_and_repetition_change_nothing_and_the_later_of_two_samples_stands(
    series: Path, tmp_path: Path
) -> None:
    lines = lines_of(LOAD)
    stale = [line.replace(line.split(",")[1], "77") for line in lines[10:40]]
    messy = [*stale, *random.Random(3).sample(lines, len(lines)), *lines[50:60]]
    other = write(tmp_path / "other.csv", messy)
    assert predicted(series, "--origins", "2") == predicted(other, "--origins", "2")


def test_rows_that_are_no_samples_are_left_out_and_said(
    series: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(LOAD)
    lines[20:20] = ["yesterday,3", "2026-11-03", f"{BEGIN},", f"{BEGIN},nan", f"{BEGIN},-4", f"{BEGIN},1e999"]
    other = write(tmp_path / "other.csv", lines)
    assert predicted(series, "--origins", "2") == predicted(other, "--origins", "2")
    assert "forecasts at 2 origins; 6 rows left out" in capsys.readouterr().out


def test_missing_hours_are_missing_and_no_origin_needs_their_truth(tmp_path: Path) -> None:
    gone = set(range(60, 66)) | {len(LOAD) - 30}
    kept = [line for index, line in enumerate(lines_of(LOAD)) if index not in gone]
    found = forecasts(read_series(write(tmp_path / "gaps.csv", kept)), 24, 100)
    origins = [origin for origin, _ in found]
    assert origins[-6:] == [len(LOAD) - 29 + late for late in range(6)]
    assert all(not gone & set(range(origin, origin + 24)) for origin in origins)


def test_slots_are_as_far_apart_as_the_samples(tmp_path: Path) -> None:
    fine = read_series(write(tmp_path / "fine.csv", lines_of(LOAD, minutes=10)))
    assert fine.slot == timedelta(minutes=10)
    assert fine.season == 144
    assert forecasts(fine, 6, 1)[0][1].method == "blend and model"


@pytest.mark.parametrize("rows", [30, 28, 26])
def test_a_short_history_is_forecast_too(tmp_path: Path, rows: int) -> None:
    found = predicted(write(tmp_path / "short.csv", lines_of(LOAD[:rows])))
    assert len(found) == rows - 24
    assert np.isfinite([one["quantiles"] for one in found]).all()


def test_evaluate_prints_the_scores_beside_the_seasonal_naive_ones(
    series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["evaluate", str(series), "--origins", "20"])
    shown = capsys.readouterr().out
    assert "20 origins, 24 slots of 1:00:00" in shown
    scores = evaluate(read_series(series), 24, (0.1, 0.5, 0.9), 20)
    assert scores is not None
    assert f"MASE      {scores.mase:.3f}   seasonal naive {scores.naive_mase:.3f}" in shown
    assert f"sPL       {scores.pinball:.3f}" in shown
    assert scores.mase < scores.naive_mase
    assert scores.pinball < scores.naive_pinball
    assert 0.6 < scores.coverage < 1


def changed(stamp: Callable[[datetime], str]) -> str:
    return "ts,y\n" + "".join(f"{stamp(BEGIN + timedelta(hours=i))},{y}\n" for i, y in enumerate(LOAD))


PLAIN = changed(lambda ts: f"{ts}")
AS_GOOD = {
    "line ends of Windows, and a mark": "\ufeff" + PLAIN.replace("\n", "\r\n"),
    "line ends of old": PLAIN.replace("\n", "\r"),
    "capitals and spaces": PLAIN.replace("ts,y", " TS , Y "),
    "semicolons": PLAIN.replace(",", ";"),
    "tabs": PLAIN.replace(",", "\t"),
    "quotes": "".join('"{}","{}"\n'.format(*line.split(",")) for line in PLAIN.splitlines()),
    "more columns, in another order": "".join(
        "{1},x,{0}\n".format(*line.split(",")) for line in PLAIN.splitlines()
    ),
    "empty lines": "\n\n" + PLAIN.replace("\n", "\n\n"),
    "Z": changed(lambda ts: f"{ts.isoformat()}Z"),
    "an offset": changed(lambda ts: f"{ts + timedelta(hours=2)}+02:00"),
    "UTC": changed(lambda ts: f"{ts} UTC"),
    "slashes": changed(lambda ts: f"{ts:%Y/%m/%d %H:%M}"),
    "seconds": changed(lambda ts: f"{(ts - datetime(1970, 1, 1)).total_seconds()}"),
    "milliseconds": changed(lambda ts: f"{(ts - datetime(1970, 1, 1)) // timedelta(milliseconds=1)}"),
    "an endless field": PLAIN.replace("\n", "\n" + "9" * 200_000 + ",1\n", 1),
    "a quote that is not closed": PLAIN.replace("\n", '\n"' + f"{BEGIN},1\n", 1),
    "unsteady clocks": changed(lambda ts: f"{ts + timedelta(seconds=random.Random(str(ts)).randint(0, 90))}"),
}


@pytest.mark.parametrize("content", AS_GOOD.values(), ids=AS_GOOD)
def test_a_file_in_another_style_is_the_same_series(series: Path, tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.csv"
    file.write_bytes(content.encode())
    found, usual = (predicted(one, "--origins", "2") for one in (file, series))
    assert [one["quantiles"] for one in found] == [one["quantiles"] for one in usual]


def test_a_constant_series_is_forecast_and_cannot_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = write(tmp_path / "constant.csv", lines_of([5.0] * 100))
    assert np.array(predicted(constant)[-1]["quantiles"]) == pytest.approx(5.0, rel=0.02)
    with pytest.raises(SystemExit):
        main(["evaluate", str(constant)])
    (line,) = capsys.readouterr().err.splitlines()
    assert "which differs from the day before" in line


MISTAKES = {
    "no file": (["predict", "nowhere.csv"], "nowhere.csv: No such file or directory"),
    "no command": (["forsee"], "invalid choice: 'forsee'"),
    "levels": (["predict", "x.csv", "--quantiles", "0.1,2"], "'0.1,2': expected numbers between 0 and 1"),
    "time zone": (["predict", "x.csv", "--time-zone", "Mars"], "'Mars': expected a time zone such as"),
    "steps": (["predict", "x.csv", "--steps", "-1"], "expected a whole number from 1"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


BROKEN = {
    "empty": ("", "the first line has nothing; expected ts,y"),
    "other columns": ("when,y\n1,2\n", "the first line has when, y; expected ts,y"),
    "no rows": ("ts,y\n", "no row has a ts"),
    "too short": ("ts,y\n2026-11-02,1\n2026-11-02T01:00,2\n", "no origin has 24 true values after it"),
}


@pytest.mark.parametrize(("content", "said"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_forecast_says_why(
    tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.csv"
    file.write_text(content)
    with pytest.raises(SystemExit):
        main(["predict", str(file)])
    assert said in capsys.readouterr().err


def test_the_series_that_ship_are_as_they_were_recorded() -> None:
    found = recorded_services()
    assert len(found) == 22
    assert len({one.source for one in found}) == 7
    assert all(np.isfinite(one.load).all() and (one.load >= 0).all() for one in found)
    assert SERIES.stat().st_size < 100_000


def test_training_learns_what_errors_look_like() -> None:
    """A short training on two services lowers the loss on what it saw, from what the untrained one has."""
    rows = Examples.joined([examples(one, 0) for one in recorded_services()[:1]])

    def loss(steps: int) -> float:
        found = rows.features
        *hidden, (weight, bias) = train(rows, 0, steps)
        for inner, shift in hidden:
            found = found @ inner + shift
            found = found / (1 + np.exp(-found))
        said = rows.centre[:, None] + rows.scale[:, None] * (found @ weight + bias)
        error = (rows.truth[:, None] - np.maximum(said, 0) ** 2) / rows.unit[:, None]
        levels = np.arange(0.05, 1, 0.1)
        return float(np.maximum(levels * error, (levels - 1) * error).mean())

    assert loss(60) < 0.9 * loss(1)


def test_the_season_goes_by_the_clock_of_a_time_zone(tmp_path: Path) -> None:
    """From nine to five on the clock in Berlin; on 31 March 2024 that begins an hour earlier in UTC."""
    zone, first = ZoneInfo("Europe/Berlin"), datetime(2024, 3, 8, tzinfo=UTC)
    hours = [first + index * timedelta(hours=1) for index in range(24 * 25)]
    load = [9.0 if 9 <= hour.astimezone(zone).hour < 17 else 1.0 for hour in hours]
    file = write(tmp_path / "load.csv", [f"{hour},{value}" for hour, value in zip(hours, load, strict=True)])

    def missed(*options: str) -> float:
        (found,) = (one for one in predicted(file, *options) if one["origin"] == f"{origin}")
        truth = load[hours.index(origin) :][:24]
        return float(sum(abs(row[1] - y) for row, y in zip(found["quantiles"], truth, strict=True)))

    origin = datetime(2024, 3, 31, 4, tzinfo=UTC)
    assert missed("--time-zone", "Europe/Berlin") < 1 < missed()
