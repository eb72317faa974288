"""Judge: LangChain's agent and its structured output talk to `quantkit serve` over loopback, as
their documentation shows them.

    python tests/judges/clients.py --python .venv-clients/bin/python        (`make test-clients`)

The model's answers are written into its weights (tests/support/scripted_model.py): it calls a tool where it
is offered one, and answers once the tool has. What LangChain sends, and what it makes of the
answers, is its own: `langchain_agent.py` runs in its environment.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import scripted_model
from serving import serve

CALL = [
    "<|call|>",
    "Let me look.",
    "\n<tool_call>\n",
    '{"name": "get_weather", ',
    '"arguments": {"city": "Os',
    'lo"}}',
    "\n</tool_call>",
]
ANSWER = ["<|answer|>", "It is", " sunny", " in Oslo."]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--python", required=True, help="of the environment that has langchain and langchain-openai"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = scripted_model.write(Path(folder) / "scripted", [CALL, ANSWER])
        with serve(str(path), "scripted") as url:
            script = Path(__file__).with_name("langchain_agent.py")
            subprocess.run([options.python, script, url], check=True, timeout=300)


if __name__ == "__main__":
    main()
