"""One thread for each test process: several run side by side, and threads that wait for others cost most."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch loads, which no test module does at import
