"""What a tensor is stands in the model's table: code outside quantkit/models neither reads it out
of a name nor asks a config for fields.

`SPELLED` lists the texts that hold a piece of a name all the same, with the reason. A text that is
gone must leave the list.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from quantkit.models.table import Block, Projection, Role

ROOT = Path(__file__).parent.parent / "quantkit"
PIECES = (
    "self_attn",
    "mlp.",
    ".mlp",
    ".experts",
    ".shared_expert",
    "_proj",
    "layers.",
    "layers\\.",
    "lm_head",
    "embed_tokens",
    "layernorm",
)
OF_THE_TABLE = {*get_args(Role), *get_args(Block), *get_args(Projection)}
UNIT = "the name of a unit of work, which quantkit makes itself"
OTHERS = (
    "spellings of other writers, or of an architecture without a table, which a diagnosis is about"
)
SPELLED: dict[str, dict[str, str]] = {
    "calibrate/source_model.py": {"layers.": UNIT, ".experts.": UNIT},
    "calibrate/sensitivity.py": {"layers.": UNIT, ".experts": UNIT},
    "quantization/memory.py": {"layers.": UNIT, ".experts": UNIT},
    "quantization/run.py": {"layers.": UNIT},
    "quantization/checks.py": {
        "lm_head\\.weight": "a head beside a tied embedding, for which the table has no row"
    },
    "checkpoint/formats/base.py": {
        "lm_head": "what engines call the head, stored or tied",
        "embed_tokens": "a 2-D weight that no engine takes for a linear",
        r"(.*?\.layers\.\d+)\.": "entries of ignore lists cover a layer by its prefix: a spelling "
        "of the format",
    },
    "checkpoint/formats/compressed_mixed.py": {
        r"(.*?\blayers\.)(\d+)\.(.+)": "a group's targets cover what is alike in every layer by "
        "one pattern: a spelling of the format",
    },
    "checkpoint/tensor_aliases.py": {
        r"^model\.embed_tokens\.": "what transformers writes for a name of DeepSeek-V4's release"
    },
    "checkpoint/stacked_experts.py": {
        r"(.*experts)\.(0|[1-9]\d{0,5})\.\w+_proj\.(weight|bias)": "an expert's tensor, as "
        "`split_stacked_experts` names it",
        "_proj.": "the same",
        "_proj": "how publishers name experts that they stack in one tensor",
    },
    "checkpoint/formats/modelslim_kinds.py": dict.fromkeys(
        ("o_proj", "down_proj"), "the format slices scale_bias of these two, for vllm-ascend"
    ),
    "checkpoint/formats/gptq.py": {"lm_head": "a key of GPTQ's description"},
    "diagnosis/behaviour.py": {"model.layers.": "what a report calls a sublayer"},
    "diagnosis/description.py": {"lm_head": "a key of GPTQ's description"},
    "diagnosis/unquantized.py": {r".*?\blayers\.\d+\.": OTHERS},
    "diagnosis/repair.py": {"model.layers.": OTHERS},
    "diagnosis/settings.py": {"model.embed_tokens.weight": OTHERS},
    "diagnosis/structure.py": dict.fromkeys(
        (
            r"(.*\.experts)\.(\d+)\.(.+)",
            r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj|w13|w2)(?:\.|_|$)",
            r"\.experts\.\d+\.",
            r"\.layers\.(\d+)\.",
            r"^(?=layers\.|embed_tokens\.|norm\.)",
            ".down_proj.",
            ".gate_proj.",
            ".mlp.",
            ".self_attn.",
            ".up_proj.",
            "eh_proj",
        ),
        OTHERS,
    ),
    "engines/check.py": {" mixes up scales of gate_proj and up_proj: ": "a message"},
}


def texts(tree: ast.Module) -> Iterator[str]:
    """Literal texts, those inside f-strings too, that are no docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            yield node.value


def pieces_of_names(tree: ast.Module) -> set[str]:
    return {
        text
        for text in texts(tree)
        if text not in OF_THE_TABLE and any(piece in text for piece in PIECES)
    }


def questions_to_configs(tree: ast.Module) -> list[str]:
    """Calls such as getattr(config, "num_key_value_heads", None)."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
    ]
    return [ast.unparse(call) for call in calls if "config" in ast.unparse(call.args[0]).lower()]


def outside_models() -> list[str]:
    files = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    return sorted(file for file in files if not file.startswith("models/"))


@pytest.mark.parametrize("file", outside_models())
def test_names_and_configs_are_not_looked_into(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert pieces_of_names(tree) == set(SPELLED.get(file, {})), (
        "ask the row of models/table.py: block, projection, role, expert, layer"
    )
    assert not questions_to_configs(tree), "ask what models.architecture.ModelConfig promises"


def test_such_code_is_found() -> None:
    tree = ast.parse(
        '"""self_attn"""\ndef f(name, config):\n    """.mlp."""\n    return ".experts." in name, '
        'getattr(config, "kv_heads", 0)\n'
    )
    assert pieces_of_names(tree) == {".experts."}
    assert questions_to_configs(tree) == ["getattr(config, 'kv_heads', 0)"]
    assert pieces_of_names(ast.parse('f"{p}.self_attn.{side}_proj"; x = f"{p}_proj"')) == {
        ".self_attn.",
        "_proj",
    }
