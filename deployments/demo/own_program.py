"""A program of somebody's own: what it gets is in its environment, what it reports it leaves in a file.

    python own_program.py SECONDS

Estimates pi by chance until the time is over.
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def main() -> None:
    """Work, and say how far it has come."""
    seconds, metrics = float(sys.argv[1]), Path(os.environ["SLOTWISE_METRICS"])
    began, inside, rows = time.monotonic(), 0, 0
    gpus, node = os.environ["SLOTWISE_GPU_INDICES"], os.environ["SLOTWISE_NODE"]
    print(f"{os.environ['SLOTWISE_JOB']} has GPUs {gpus} of {node}")
    while (elapsed := time.monotonic() - began) < seconds:
        inside += sum(random.random() ** 2 + random.random() ** 2 <= 1 for _ in range(10_000))
        rows += 10_000
        report = {"progress": min(elapsed / seconds, 1.0), "rows_per_s": rows / max(elapsed, 1e-9)}
        draft = metrics.with_suffix(".draft")
        draft.write_text(json.dumps({**report, "pi": 4 * inside / rows}))
        draft.replace(metrics)
        time.sleep(0.2)
    print(f"pi is about {4 * inside / rows:.3f}, from {rows} points")


if __name__ == "__main__":
    main()
