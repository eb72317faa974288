"""One interface to a model: `Generator` (generator.py), implemented by `Local` (a checkpoint,
local.py) and `Endpoint` (an OpenAI-compatible server, endpoint.py over openai_server.py)."""
