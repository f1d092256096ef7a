"""The forecast beside the field's: seasonal naive, statsforecast and LightGBM (`pip install -e .[bench]`).

Held out twice: the networks are trained here without the source of the series that is scored, and every
forecast is made of what came before its origin. MASE is the mean absolute error in units of the mean
|y[t] - y[t - 24]| before the origin, sPL the mean of twice the pinball loss at .1, .5 and .9 in the same
unit, coverage the share of truth between the .1 and .9 quantiles, width their distance in that unit.
"""

import gc
import importlib.util
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

from tasks.experts import Array, Blend, Index
from tasks.forecast import Calendar, averaged, between, expected, forecast, own, usable
from tasks.forecast_scores import pinball, seasonal_difference, seasonal_naive
from tasks.forecast_training import HORIZON, HOUR, SEASON, Series, examples, held_out, read_series
from tasks.quantile_model import Layers

Method = Callable[[Series, int], Array]
SCORED = (0.1, 0.5, 0.9)
REAL_TIME = ("llm_azure2024_code", "llm_azure2024_conv", "llm_servegen_m_large", "web_nab_elb_requests")
CLUSTERS = ("gpu_helios_earth_demand", "nodes_philly_active")
EVERY = 6  # hours between origins, of the last hundred
WIDTHS = (0.6, 0.8, 1.0, 1.25, 1.5)


def blend_of(series: Series, origin: int) -> Array:
    return between(own(_expected(series, origin)), SCORED)


def ours(networks: dict[str, tuple[Layers, ...]]) -> Method:
    """Blend and networks that never saw the source of the series."""
    return lambda series, origin: between(
        averaged(_expected(series, origin), networks[series.source]), SCORED
    )


def naive(series: Series, origin: int) -> Array:
    return seasonal_naive(series.load[:origin], HORIZON, SEASON, SCORED)


def mstl(series: Series, origin: int) -> Array:
    from statsforecast.models import MSTL

    past = series.load[max(0, origin - 35 * SEASON) : origin]
    seasons = [SEASON, 7 * SEASON] if len(past) > 15 * SEASON else [SEASON]
    found = MSTL(season_length=seasons).forecast(y=past, h=HORIZON, level=[80])
    rows = np.stack([found["lo-80"], found["mean"], found["hi-80"]], axis=1)
    return np.asarray(np.maximum(rows, 0.0))


def lightgbm(series: Series, origin: int) -> Array:
    """Quantile regression on lags, means, hour, day and distance; one model for each quantile."""
    import lightgbm as lgb

    load = series.load
    first = max(SEASON, origin - 28 * SEASON)
    ahead = np.arange(1, HORIZON + 1)

    def table(origins: Index) -> Array:
        """`origins` are the first slots that are forecast."""
        o, h = (grid.ravel() for grid in np.meshgrid(origins, ahead, indexing="ij"))
        target = o + h - 1
        week = np.where(target >= 7 * SEASON, target - 7 * SEASON, target - SEASON)
        sums = np.concatenate(([0.0], np.cumsum(load)))
        means = [(sums[o] - sums[np.maximum(o - n, 0)]) / np.minimum(n, o) for n in (3, SEASON)]
        clock = (series.begin.weekday() * 24 + series.begin.hour + target) % (7 * 24)
        lags = [load[o - 1], load[target - SEASON], load[np.minimum(week, o - 1)]]
        return np.stack([*lags, *means, clock % 24, clock // 24, h], axis=1)

    origins = np.arange(first, origin - HORIZON + 1, 2)
    features = table(origins)
    truth = np.concatenate([load[o : o + HORIZON] for o in origins])
    asked = table(np.array([origin]))
    rows = []
    for level in SCORED:
        settings = {
            "objective": "quantile",
            "alpha": level,
            "num_leaves": 15,
            "num_threads": 1,
            "verbose": -1,
        }
        model = lgb.train(settings, lgb.Dataset(features, truth), num_boost_round=120)
        rows.append(model.predict(asked))
    return np.asarray(np.maximum(np.sort(np.stack(rows, axis=1), axis=1), 0.0))


FIELD = {"statsforecast": mstl, "lightgbm": lightgbm}


def _expected(series: Series, origin: int) -> Blend:
    past = usable(series.load[:origin].tolist(), SEASON)
    return expected(past, HORIZON, SEASON, Calendar(series.begin, HOUR).later(origin))


def score(series: Series, method: Method, widths: tuple[float, ...] = (1.0,)) -> Array:
    """Width × (MASE, next hour's, sPL, coverage, width, CPU ms), means over the origins."""
    rows = []
    last = len(series.load) - HORIZON
    for origin in range(max(last - 99, 2 * SEASON + 2), last + 1, EVERY):
        unit = seasonal_difference(series.load[:origin], SEASON)
        truth = series.load[origin : origin + HORIZON]
        begin = time.process_time()
        found = method(series, origin)
        cpu_ms = 1000 * (time.process_time() - begin)
        error = np.abs(truth - found[:, 1]) / unit
        per_width = []
        for width in widths:
            rows_now = np.maximum(found[:, 1:2] + width * (found - found[:, 1:2]), 0.0)
            inside = np.mean((truth >= rows_now[:, 0]) & (truth <= rows_now[:, 2]))
            loss = pinball(truth, rows_now, SCORED) / unit
            spread = np.mean(rows_now[:, 2] - rows_now[:, 0]) / unit
            per_width.append((error.mean(), error[0], loss, inside, spread, cpu_ms))
        rows.append(per_width)
    return np.asarray(np.mean(np.array(rows, dtype=np.float64), axis=0))


@pytest.mark.benchmark
def test_the_forecast_beside_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    warnings.filterwarnings("ignore")
    every = read_series()
    shown = [one for one in every if one.name in REAL_TIME + CLUSTERS]
    made = {one.name: examples(one, 0) for one in every}
    sources = {one.source for one in shown}
    networks = held_out(every, made, (0,), only=sources)
    methods: dict[str, Method] = {"seasonal naive": naive, "blend": blend_of, "slotwise": ours(networks)}
    absent = [name for name in FIELD if importlib.util.find_spec(name) is None]
    methods |= {name: method for name, method in FIELD.items() if name not in absent}
    scores = {name: {one.name: score(one, method)[0] for one in shown} for name, method in methods.items()}
    widths = {one.name: score(one, ours(networks), WIDTHS) for one in shown}
    with capsys.disabled():
        _print_table(scores, shown, absent)
        _print_widths(widths, shown)
    mean = {name: np.mean([of[one.name][2] for one in shown]) for name, of in scores.items()}
    assert mean["slotwise"] < 0.77 * mean["seasonal naive"]
    assert all(mean["slotwise"] < 0.9 * mean[name] for name in FIELD if name in mean)


def _print_table(scores: dict[str, dict[str, Array]], shown: list[Series], absent: list[str]) -> None:
    print("\nseries                    method          MASE  next h    sPL  less  covers  width  CPU ms")
    groups = {one.name: [one.name] for one in shown}
    groups |= {"real-time, mean": list(REAL_TIME), "all six, mean": [one.name for one in shown]}
    for title, names in groups.items():
        base = np.mean([scores["seasonal naive"][name][2] for name in names])
        for method, of in scores.items():
            mase, hour, loss, inside, width, cpu_ms = np.mean([of[name] for name in names], axis=0)
            print(
                f"{title:25} {method:14} {mase:5.2f} {hour:7.2f} {loss:6.3f} {1 - loss / base:5.0%} "
                f"{inside:7.2f} {width:6.2f} {cpu_ms:7.1f}"
            )
            title = ""
    print(f"less: sPL below the seasonal naive's. Not installed: {', '.join(absent) or 'nothing'}")


def _print_widths(widths: dict[str, Array], shown: list[Series]) -> None:
    print("\nintervals of slotwise made wider or narrower by a factor: covers / sPL, mean of all six")
    table = np.mean([widths[one.name] for one in shown], axis=0)
    for factor, (_, _, loss, inside, width, _) in zip(WIDTHS, table, strict=True):
        print(f"× {factor:4.2f}  covers {inside:.2f}  width {width:.2f}  sPL {loss:.3f}")


@pytest.mark.benchmark
def test_what_a_forecast_costs(capsys: pytest.CaptureFixture[str]) -> None:
    series = next(one for one in read_series() if one.name == "nodes_philly_active")
    past = series.load[-28 * SEASON :].tolist()
    calendar = Calendar(series.begin, HOUR)
    forecast(past, HORIZON, SEASON, 1.0, calendar)
    gc.collect()

    def cpu_ms(steps: int, season: int, history: list[float], slot: timedelta, count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            forecast(history, steps, season, 1.0, Calendar(series.begin, slot))
        return 1000 * (time.process_time() - begin)

    fine = np.repeat(past, 6).tolist()
    code = (
        "import time; t = time.process_time(); from tasks.forecast import forecast; "
        "forecast([1.0, 2.0] * 336, 24, 24, 1.0); "
        "print(time.process_time() - t, open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    cold = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, cold.stdout.split())
    with capsys.disabled():
        print(f"\nfour weeks of hours: 100 services {cpu_ms(24, 24, past, HOUR, 100):.0f} ms CPU")
        print(f"four weeks of 10 minutes, 144 slots: {cpu_ms(144, 144, fine, HOUR / 6, 5) / 5:.0f} ms CPU")
        print(f"a new process: {seconds:.2f} s CPU to import and forecast, {kilobytes / 1024:.0f} MB at most")
