"""Train language models and say honestly how much of the hardware they used.

`python -m training run CONFIG` trains; `flops` and `mfu` compute. Importing this package loads neither
torch nor transformers: each module loads them when a function needs them.
"""
