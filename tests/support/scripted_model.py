"""A checkpoint that says what a test wrote: its next token depends on the last one alone.

    write(path, [["<|call|>", "<tool_call>\\n", ...], ["<|answer|>", "It is ", "sunny."]], template)

Residual branches are zero, so a hidden state is the embedding of its token, and each row of lm_head
is the embedding of the token before its own. A chain begins with a mark that the chat template puts
at a prompt's end, and ends the answer. All of it is computed by the engine as for any model; only
the weights are simple. Tokens that are in no chain are followed by what is random and always the
same.
"""

import json

import make_model
import torch
from tokenizers import AddedToken, Tokenizer

VOCAB, _WRITTEN = 384, 300
"""Tokens of the model, and of its tokenizer before the chains'."""
_EOS = 1

TEMPLATE = (
    "{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<｜User｜>{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson "
    "}}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|answer|>' if messages[-1].role == 'tool' or not tools "
    "else '<|call|>' }}{% endif %}"
)
"""Writes calls as Hermes does; the answer calls a tool where there are some and none has answered
yet."""


def write(path, chains, template=TEMPLATE):
    """A BF16 checkpoint of R1's shape. Each text of a chain is one token, and stands in one chain
    only.

    Checkpoints of the same texts have the same tokens.
    """
    said = [text for chain in chains for text in chain]
    assert len(set(said)) == len(said) < VOCAB - _WRITTEN, (
        "a text stands in two chains, or there are too many"
    )
    config = make_model.tiny_config(vocab_size=VOCAB, num_hidden_layers=2)
    tensors = make_model.random_tensors(config)
    path.mkdir(parents=True, exist_ok=True)
    make_model.write_tokenizer(path, _WRITTEN)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in sorted(said)])
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    for chain in chains:
        ids = [tokenizer.token_to_id(text) for text in chain]
        for before, after in zip(ids, [*ids[1:], _EOS]):
            head[after] = embeddings[before] + (head[after] if after == _EOS else 0)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    make_model.write_dense(path, config, tensors)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return path
