"""What a training run will need and take, from its config alone: memory, tokens, time, cost.

    config ─▶ workload   calls and tokens of a step          accelerators   what a GPU can do
              shapes     sizes of the model                   rates          what was measured of it
                 │                                               │
                 └────▶ memory   what a GPU holds  ◀─────────────┤
                 └────▶ times    seconds of each kind of work ◀──┘
                           └──▶ simulation   the schedule of a step, event by event
                                   └──▶ plan   one layout, the best split, what does not fit

Everything is arithmetic on values: no torch, no Ray, no GPU, no network. What is measured is in `rates`, with
its source. Not here: the same for a reading (`agent/plan.py`) and for an evaluation (`eval/forecast.py`).
"""
