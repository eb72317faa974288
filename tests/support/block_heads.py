"""Small models of random weights with a DSpark head."""

import make_model
import torch
from tiny_models import CONFIGS, random_tensors, rows_of

from quantkit.models import find_architecture, find_block_head
from quantkit.models.dspark import Window

V4 = {
    "model_type": "deepseek_v4",
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 3,
    "dspark_target_layer_ids": [0, 2],
    "dspark_noise_token_id": 7,
}
V41 = {**CONFIGS["deepseek_v41"]["text_config"], "dspark_target_layer_ids": [1, 4]}
"""It reads a layer with a table."""
MODELS = {
    "deepseek_v4": {**CONFIGS["deepseek_v4"], **V4},
    "deepseek_v41": {**CONFIGS["deepseek_v41"], "text_config": V41},
}


def head_rows(config):
    made = find_architecture(config).Config.from_dict(config)
    return find_block_head(config).head_parameters(made)


def write_with_head(path, config):
    """Some tokens are likelier than all others, so that drafts of a random head are accepted."""
    head = rows_of(head_rows(config), torch.Generator().manual_seed(12))
    tensors = {
        name: one for name, one in random_tensors(config).items() if not name.startswith("mtp.")
    }
    tensors["head.weight"][:3] *= 30
    return make_model.write_dense(path, config, tensors | head)


def block_after(head, keys, at, token):
    """Hidden states of the block that follows the text of these keys [T, ...] up to `at`, and this
    token [1]."""
    there = min(at, head.window)
    window = torch.zeros(1, head.window, *keys.shape[1:])
    window[0, head.window - there :] = keys[at - there : at]
    seen = torch.arange(head.window)[None] >= head.window - there
    return head.hidden(token, torch.tensor([at]), Window(window, seen))[0]
