"""How the networks of `quantile_model` are trained: across recorded services, each seen as a new one.

Invariant: an example is what `forecast` itself would see at that moment, made by the same code from the
slots before it; a network is scored only on services whose source it was not trained on. Two services of one
source (one company's two products) count as one. The cost of the choice: minutes, for a few ten thousand
examples; torch is needed here and nowhere else in forecasting.
"""

import csv
import gzip
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from tasks.experts import LEVELS, Array
from tasks.forecast import Calendar, averaged, between, expected, own, usable
from tasks.forecast_scores import pinball, seasonal_difference, seasonal_naive
from tasks.quantile_model import Layers

SERIES = Path(__file__).parent / "pretraining" / "series.csv.gz"
SEASON, HORIZON = 24, 24
HOUR = timedelta(hours=1)
SLICES = 8  # shorter histories made of each series, altered
SHORTEST, LONGEST = 60, 260  # hours of a slice
FIRST, EVERY = 30, 3  # hours before the first origin, and between two
MOST_HOURS = 1500  # of a series
CALENDAR_KNOWN = 0.8  # share of the slices
HIDDEN = 64
STEPS, BATCH, RATE, WEIGHT_DECAY = 1500, 2048, 4e-3, 1e-3
LEAST_UNIT = 0.05  # of the load: a series that hardly changes does not rule either
LARGE_LOSS = 2.0  # beyond it a loss counts by its logarithm: a few absurd hours do not rule
START = (-2.0, -1.25, -0.8, -0.45, -0.15, 0.15, 0.45, 0.8, 1.25, 2.0)  # of the quantiles, in error scales


@dataclass(frozen=True)
class Series:
    """A recorded service, hour by hour."""

    name: str
    source: str  # services of one source are held out together
    begin: datetime
    load: Array


@dataclass(frozen=True)
class Examples:
    """Rows for the steps of one forecast or of many."""

    features: Array
    centre: Array  # √load, as the blend has it
    scale: Array
    truth: Array  # load
    unit: Array  # the mean seasonal difference before the origin, in which a loss counts
    weight: Array

    @staticmethod
    def joined(parts: "Sequence[Examples]") -> "Examples":
        """All rows of the parts."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return Examples(*(np.concatenate(column) for column in columns))


def read_series(file: Path = SERIES) -> list[Series]:
    """The series in the package (pretraining/README.md says whence), or in a file like it."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [
            Series(
                row["series"],
                row["source"],
                datetime.fromisoformat(row["begin"]),
                np.array(row["load"].split(), dtype=np.float64),
            )
            for row in csv.DictReader(lines)
        ]


def examples(series: Series, seed: int) -> Examples:
    """Forecasts of a series and of altered slices of it, with what came; they weigh as one service."""
    random = np.random.default_rng([seed, *series.name.encode()])
    load, begin = series.load[-MOST_HOURS:], series.begin + max(0, len(series.load) - MOST_HOURS) * HOUR
    parts = list(_forecasts(load, Calendar(begin, HOUR)))
    for _ in range(SLICES):
        size = int(random.integers(SHORTEST, min(LONGEST, len(load)) + 1))
        first = int(random.integers(0, len(load) - size + 1))
        calendar = Calendar(begin + first * HOUR, HOUR) if random.random() < CALENDAR_KNOWN else None
        parts += _forecasts(_altered(load[first : first + size], random), calendar)
    rows = Examples.joined(parts)
    # Long series teach more than short ones, but not in proportion.
    rows.weight[:] = len(rows.weight) ** -0.5
    return rows


def _forecasts(load: Array, calendar: Calendar | None) -> Iterator[Examples]:
    """The steps of a forecast at every third hour; `calendar` begins with the load."""
    for origin in range(min(FIRST, len(load) - 2), len(load) - 1, EVERY):
        past = usable(load[:origin].tolist(), SEASON)
        unit = max(seasonal_difference(load[:origin], SEASON), LEAST_UNIT * float(np.nanmean(load[:origin])))
        truth = load[origin : origin + HORIZON]
        known = np.isfinite(truth)
        if unit <= 0 or not known.any():
            continue
        found = expected(past, HORIZON, SEASON, calendar and calendar.later(origin))
        rows = np.flatnonzero(known)
        yield Examples(
            found.features[rows],
            found.centre[rows],
            found.scale[rows],
            truth[rows],
            np.full(len(rows), unit),
            np.ones(len(rows)),
        )


def _altered(load: Array, random: np.random.Generator) -> Array:
    """The load as another service might have had it: drifting, noisier, with gaps; or as it is."""
    drift = 0.03 * random.random() * (random.random() < 0.5)
    noise = 0.2 * random.random() * (random.random() < 0.5)
    gaps = 0.1 * (random.random() < 0.15)
    size = len(load)
    changed = load * np.exp(np.cumsum(random.normal(0, drift, size)) + random.normal(0, noise, size))
    inner = np.arange(size) > SEASON + 2
    return np.where((random.random(size) < gaps) & inner, np.nan, changed)


def train(rows: Examples, seed: int, steps: int = STEPS) -> Layers:
    """One network, from examples. The loss is the mean pinball loss of the load at LEVELS."""
    import torch

    torch.manual_seed(seed)
    features, centre, scale, truth, unit = (
        torch.tensor(column, dtype=torch.float32) for column in list(vars(rows).values())[:-1]
    )
    levels = torch.tensor(LEVELS)
    network = torch.nn.Sequential(
        torch.nn.Linear(features.shape[1], HIDDEN),
        torch.nn.SiLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.SiLU(),
        torch.nn.Linear(HIDDEN, len(LEVELS)),
    )
    linear = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        linear[-1].weight.mul_(0.1)
        linear[-1].bias.copy_(torch.tensor(START))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    # numpy draws: torch's multinomial takes at most 2^24 rows.
    share = rows.weight / rows.weight.sum()
    drawn = np.random.default_rng(seed).choice(len(share), size=(steps, BATCH), p=share)
    for batch in torch.from_numpy(drawn):
        said = centre[batch, None] + scale[batch, None] * network(features[batch])
        error = (truth[batch, None] - torch.relu(said) ** 2) / unit[batch, None]
        loss = torch.maximum(levels * error, (levels - 1) * error).mean(dim=1)
        loss = torch.where(loss < LARGE_LOSS, loss, LARGE_LOSS * (1 + torch.log(loss / LARGE_LOSS)))
        optimizer.zero_grad()
        loss.mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return tuple(
        (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy()) for layer in linear
    )


def held_out(
    series: Iterable[Series],
    made: dict[str, Examples],
    seeds: Sequence[int],
    steps: int = STEPS,
    only: Collection[str] | None = None,
) -> dict[str, tuple[Layers, ...]]:
    """For each source, or `only` for some, networks trained on all the others."""
    named = {one.name: one.source for one in series}
    found = {}
    for source in sorted(set(named.values() if only is None else only)):
        rows = Examples.joined([part for name, part in made.items() if named[name] != source])
        found[source] = tuple(train(rows, seed, steps) for seed in seeds)
    return found


def compared(series: Iterable[Series], networks: dict[str, tuple[Layers, ...]]) -> Iterator[str]:
    """A line for each series: scaled pinball loss at .1, .5 and .9 over the last 100 origins."""
    yield f"{'series':28}  source    seasonal naive  blend  networks  both   80 % covers"
    levels = (0.1, 0.5, 0.9)
    for one in series:
        rows = []
        for origin in range(max(2 * SEASON, len(one.load) - HORIZON - 99), len(one.load) - HORIZON + 1):
            past, truth = one.load[:origin], one.load[origin : origin + HORIZON]
            unit = seasonal_difference(past, SEASON)
            if not unit > 0:
                continue
            calendar = Calendar(one.begin, HOUR).later(origin)
            found = expected(usable(past.tolist(), SEASON), HORIZON, SEASON, calendar)
            blended, both = own(found), averaged(found, networks[one.source])
            made = [between(q, levels) for q in (blended, 2 * both - blended, both)]
            inside = np.mean((truth >= made[2][:, 0]) & (truth <= made[2][:, 2]))
            naive = seasonal_naive(past, HORIZON, SEASON, levels)
            rows.append([*(pinball(truth, q, levels) / unit for q in (naive, *made)), inside])
        naive_loss, *losses, inside = np.mean(np.array(rows, dtype=np.float64), axis=0)
        told = "".join(f"{loss:9.3f}" for loss in losses)
        yield f"{one.name:28}  {one.source:9} {naive_loss:12.3f}{told}{inside:12.2f}"
