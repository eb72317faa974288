"""A recipe's settings for models of `make_model`: every method has something to do, and a run takes
seconds."""

SMALL = {
    "samples": 6,
    "held_out": 2,
    "seq_len": 32,
    "scale_points": 3,
    "fit_points": 2,
    "sweeps": 2,  # steps are fitted between two
    "search_rows": 16,
    "min_expert_tokens": 16,
}
