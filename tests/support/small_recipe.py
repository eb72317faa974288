"""A recipe's settings for models of `make_model`: every method has something to do, and a run takes
seconds; and the texts that a recipe takes."""

from quantkit.calibrate.data import load_sequences
from quantkit.tokenizer.chat import ChatTokenizer

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


def sequences_of(recipe, source):
    """What calibration by the recipe reads of its text, and what it holds out."""
    return load_sequences(recipe.calibration, ChatTokenizer(source), **recipe.sizes)
