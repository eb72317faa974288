"""The house's own rules: imports run one way, names mean one thing, the model's table owns
structure, and help answers without heavy packages."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

from quantkit.models.table import Block, Projection, Role

ROOT = Path(__file__).parent.parent
SOURCES = {
    path.relative_to(folder).as_posix(): path.read_text()
    for folder in (ROOT, ROOT / "kernels")
    for package in ("quantkit", "quantkit_kernels")
    for path in sorted((folder / package).rglob("*.py"))
}
"""By path below the folder that holds its package."""
LEVELS = [
    {"quantkit_kernels"},
    {"common"},
    {"tokenizer"},
    {"grids"},
    {"quant"},
    {"checkpoint"},
    {"models"},
    {"calibrate", "executor", "engines"},
    {"quantization", "evaluation"},
    {"planning", "diagnosis", "deploy", "playground"},
    {"api"},
    {"guide"},
    {"cli"},
]
EXECUTOR_LEVELS = [
    {"options"},
    {"sampling"},
    {"cache", "ranks"},
    {"weights"},
    {"scheduler"},
    {"runner"},
    {"speculation"},
    set(),  # the engine and the other files at the top of executor/, which import each other
    {"server"},
]
HEAVY = {"torch", "transformers", "matplotlib", "fastapi", "math_verify", "numpy", "sympy"}


def imports(tree, when_run=False):
    """`a.b` of `from a import b`, at the top or inside functions. when_run: without what only a
    type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif when_run and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for other in node.orelse for name in imports(other, when_run))
        else:
            yield from imports(node, when_run)


def level(levels, name):
    return next((n for n, names in enumerate(levels) if name in names), levels.index(set()))


def upward(path, source):
    """Imports of what is not below: rooms of the house, and folders of executor/."""
    own, found = path.removesuffix(".py").split("/"), []
    for name in imports(ast.parse(source)):
        parts = name.split(".")
        if own[0] == "quantkit_kernels":
            found += [name] if parts[0] == "quantkit" else []
        elif parts[0] == "quantkit" and len(own) > 1 and len(parts) > 1 and "_" not in own[1][:1]:
            if parts[1] not in (own[1], "__version__"):
                below = level([*LEVELS, set()], parts[1]) < level([*LEVELS, set()], own[1])
                found += [] if below else [name]
            elif own[1] == parts[1] == "executor" and len(own) > 2 < len(parts):
                here, there = (level(EXECUTOR_LEVELS, one) for one in (own[2], parts[2]))
                same = here == there == EXECUTOR_LEVELS.index(set())
                found += [] if parts[2] == own[2] or there < here or same else [name]
    return found


def circle(sources):
    """Modules that import each other in a circle when run, the first one again at the end; empty
    where there is none. A name of a package is the package's own file."""
    modules = {
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): source
        for path, source in sources.items()
    }
    targets = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name in imports(ast.parse(source), when_run=True)
        }
        & modules.keys() - {module}
        for module, source in modules.items()
    }
    done = set()

    def search(path):
        for target in sorted(targets[path[-1]] - done):
            if target in path:
                return [*path[path.index(target) :], target]
            if found := search([*path, target]):
                return found
        done.add(path[-1])
        return []

    return next(
        (found for one in sorted(modules) if one not in done and (found := search([one]))), []
    )


def folders(room):
    """The folders and loose files of a room as if each were one file, by its imports."""
    found = {}
    for path in (path for path in SOURCES if path.startswith(room)):
        names = imports(ast.parse(SOURCES[path]), when_run=True)
        folder = "/".join(path.removesuffix(".py").split("/")[:3])
        lines = "".join(f"import {'.'.join(name.split('.')[:3])}\n" for name in names)
        found[folder] = found.get(folder, "") + lines
    return found


CIRCLE = {
    "p/__init__.py": "",
    "p/a.py": "from p import b",
    "p/b.py": "import p.c",
    "p/c.py": "def f():\n    from p.a import x",
}
TYPED = {
    "p/a.py": "from p.b import x",
    "p/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import p.a",
}


def test_imports_run_one_way_and_in_no_circle():
    rooms = {path.split("/")[1].removesuffix(".py") for path in SOURCES if path[8] == "/"}
    assert rooms - {"__init__", "__main__"} <= set().union(*LEVELS), "give it a place in LEVELS"
    wrong = {path: found for path, source in SOURCES.items() if (found := upward(path, source))}
    assert not wrong
    assert not circle(SOURCES)
    assert not circle(folders("quantkit/evaluation/"))
    assert (circle(CIRCLE), circle(TYPED)) == (["p.a", "p.b", "p.c", "p.a"], [])
    assert upward("quantkit/grids/a.py", "from quantkit.cli import app") == ["quantkit.cli.app"]
    assert upward("quantkit/executor/cache/a.py", "import quantkit.executor.engine")
    assert upward("quantkit_kernels/a.py", "import quantkit.grids")


OWN_NAMES = {"Config", "Model", "DecoderLayer", "Attention", "MtpLayer"}
"""Classes that each architecture has."""


def classes_twice(files):
    """Names of two classes in a room, less an architecture's own and what a backend calls by its
    operator."""
    found = {}
    for path, source in files.items():
        architecture = "/models/" in path or path.endswith("/model.py")
        backend = "quantkit_kernels/" in path and path.count("/") > 1
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not (
                (architecture and node.name in OWN_NAMES)
                or (backend and node.name.endswith(("Linear", "Experts")))
            ):
                room = path.split("/")[1] if path.startswith("quantkit/") else path.split("/")[0]
                found.setdefault(f"{room}.{node.name}", []).append(path)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_class_name_means_one_thing_in_a_room():
    more = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in ("benchmarks", "tools")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert not classes_twice(SOURCES | more)
    own = "class Config:\n  pass\nclass Table:\n  pass"
    twice = classes_twice({"quantkit/models/a.py": own, "quantkit/models/b.py": own})
    assert twice.keys() == {"models.Table"}


PIECES = (
    *("self_attn", "mlp.", ".mlp", ".experts", ".shared_expert", "_proj", "layers."),
    *("layers\\.", "lm_head", "embed_tokens", "layernorm"),
)
OF_THE_TABLE = {*get_args(Role), *get_args(Block), *get_args(Projection)}
UNIT = "the name of a unit of work, which quantkit makes itself"
OTHERS = (
    "spellings of other writers, or of an architecture without a table, which a diagnosis is about"
)
SPELLED = {
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
        "one pattern: a spelling of the format"
    },
    "checkpoint/tensor_aliases.py": {
        r"^model\.embed_tokens\.": "what transformers writes for a name of DeepSeek-V4's release",
        ".gate_proj.": "a name of Hy4's release",
    },
    "checkpoint/stacked_experts.py": {
        r"(.*experts)\.(0|[1-9]\d{0,5})\.\w+_proj\.(weight|bias)": "an expert's tensor, as "
        "`split_stacked_experts` names it",
        "_proj.": "the same",
        "_proj": "how publishers name experts that they stack in one tensor",
    },
    "checkpoint/formats/compressed.py": {
        r"(?:.*\.)?(?:embed|embed_in|embed_tokens\w*|tok_embeddings|word_embeddings|wte)": "the "
        "description names classes, which headers do not"
    },
    "checkpoint/formats/modelslim.py": dict.fromkeys(
        ("o_proj", "down_proj"), "the format slices scale_bias of these two, for vllm-ascend"
    ),
    "checkpoint/formats/gptq.py": {"lm_head": "a key of GPTQ's description"},
    "diagnosis/behaviour.py": {"model.layers.": "what a report calls a sublayer"},
    "diagnosis/description.py": {"lm_head": "a key of GPTQ's description"},
    "diagnosis/unquantized.py": dict.fromkeys(
        (r".*?\blayers\.\d+\.", "model.embed_tokens.weight"), OTHERS
    ),
    "diagnosis/corrections.py": {"model.layers.": OTHERS},
    "diagnosis/settings.py": {"model.embed_tokens.weight": OTHERS},
    "diagnosis/structure.py": dict.fromkeys(
        (
            r"(.*\.experts)\.(\d+)\.(.+)",
            r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj|w13|w2)(?:\.|_|$)",
            r"\.experts\.(\d+)\.",
            r"\.layers\.(\d+)\.",
            "eh_proj",
        ),
        OTHERS,
    ),
    "engines/rule_check.py": {" mixes up scales of gate_proj and up_proj: ": "a message"},
}
"""Texts outside quantkit/models that hold a piece of a tensor's name all the same, with the reason.
One that is gone leaves the list."""


def pieces_of_names(tree):
    """Literal texts, those inside f-strings too, that are no docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documentation
        and node.value not in OF_THE_TABLE
        and any(piece in node.value for piece in PIECES)
    }


def questions_to_configs(tree):
    """Calls such as getattr(config, "num_key_value_heads", None)."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr")
        and "config" in ast.unparse(node.args[0]).lower()
    ]


def test_names_and_configs_are_not_looked_into_outside_models():
    spelled, asked = {}, {}
    for path, source in SOURCES.items():
        name = path.removeprefix("quantkit/")
        if path != name and not name.startswith("models/"):
            tree = ast.parse(source)
            spelled |= {name: found} if (found := pieces_of_names(tree)) else {}
            asked |= {name: found} if (found := questions_to_configs(tree)) else {}
    assert spelled == {name: set(texts) for name, texts in SPELLED.items()}, (
        "ask the row of models/table.py: block, projection, role, expert, layer"
    )
    assert not asked, "ask what models.architecture.ModelConfig promises"
    tree = ast.parse(
        '"""self_attn"""\ndef f(name, config):\n    """.mlp."""\n    return ".experts." in name, '
        'getattr(config, "kv_heads", 0), f"{p}.{side}_proj"\n'
    )
    assert pieces_of_names(tree) == {".experts.", "_proj"}
    assert questions_to_configs(tree) == ["getattr(config, 'kv_heads', 0)"]


def test_help_imports_nothing_heavy():
    probe = (
        "import sys, runpy\n"
        "sys.argv = ['quantkit', '--help']\n"
        "try: runpy.run_module('quantkit', run_name='__main__')\n"
        f"except SystemExit: print('HEAVY', sorted({HEAVY!r} & set(sys.modules)), "
        "file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stderr
    assert "quantize" in done.stdout
