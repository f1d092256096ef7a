"""The scenarios that ship with the product."""

from pathlib import Path

SCENARIOS = Path(__file__).parents[2] / "allocator" / "scenarios"

# Proven optima of the objective.
BEST = {
    "contention": 1052,
    "deadlines": 688,
    "fragmentation": 1326,
    "light_load": 100,
    "realtime_burst": 1286,
    "realtime_peak": 1180,
    "scale": 1872,
}
