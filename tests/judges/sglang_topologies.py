"""The command that `quantkit deploy` prints for SGLang on one box, run on cards; SGLang must give
quantkit's tokens.

    python tests/judges/sglang_topologies.py --sglang PYTHON --directory DIR --cards 1 --steps write,run \
        --cases deepseek_v3-middle:awq:tensor
    python tests/judges/vllm_topologies.py --directory DIR --cards 1 --steps compare --engine "sglang 0.5.16" --machine H200

What is added to the printed command is in ADDED: prompts are token ids, attention is Triton's and
sampling torch's, so that flashinfer is not asked, nothing is captured, and memory is given, so that
several servers run on the same cards.
"""

import sys

from judged import MAX_TOKENS
from vllm_server import KEY, Server, fill
from vllm_topologies import CONTEXT, TOPOLOGIES, main

from quantkit.deploy.launch import deploy

FIRST_PORT, PORTS = 21000, 64
MEMORY = "0.6"  # of what is free when a server starts; the tokens below take little of it
ADDED = (
    f"--api-key {KEY} --skip-tokenizer-init --skip-server-warmup --attention-backend triton "
    "--sampling-backend pytorch --disable-cuda-graph --disable-custom-all-reduce "
    "--max-running-requests 8 --max-total-tokens 16384"
).split()


class SglangServer(Server):
    def answer(self, model, prompt):
        asked = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 5,
        }
        found = self.post("/generate", asked)["meta_info"]
        top = [
            [[token, value] for value, token, *_ in position]
            for position in found["output_top_logprobs"]
        ]
        tokens = [token for _, token, *_ in found["output_token_logprobs"]]
        return {"tokens": tokens, "logprobs": top}


def command_of(path, python, cards, port, guesses):
    """Environment and words: what deploy prints, with PYTHON, the port and ADDED filled in."""
    asked = {"device": "cuda", "devices": cards, "context": CONTEXT, "draft_length": guesses}
    made = deploy(path, "sglang", layout="one-box", **asked)
    ((environment, printed),) = made.launches[0].commands
    words = [python, *printed[1:]]
    fill(words, {"--port": port, "--mem-fraction-static": MEMORY})
    return environment, [*words, *ADDED, "--nccl-port", str(port + PORTS // 2)]


def started(number, case, asked):
    model, format, topology = case
    port, guesses = FIRST_PORT + PORTS * number, TOPOLOGIES[topology].guesses
    path = asked.directory / model / format
    environment, words = command_of(path, asked.python, asked.cards, port, guesses)
    server = SglangServer(f"http://127.0.0.1:{port}")
    server.start(words, environment, asked.directory / f"sglang-{'-'.join(case)}.log")
    return server


if __name__ == "__main__":
    sys.exit(main(started))
