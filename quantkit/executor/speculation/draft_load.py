"""A draft model, or a head of EAGLE-3, that somebody brought: whether it can guess for a model, and
how it is loaded."""

from pathlib import Path

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.executor.cache.cache import CachePlan
from quantkit.executor.options import EngineOptions
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.graphs import Capture
from quantkit.executor.runner.runner import Runner
from quantkit.executor.speculation.draft_model import ModelDrafter, SameTokens
from quantkit.executor.speculation.drafter import Drafter
from quantkit.executor.speculation.eagle_head import LoadedHead, load_head
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.models.eagle3 import is_head
from quantkit.tokenizer.agreement import check_same_ids
from quantkit.tokenizer.chat import ChatTokenizer


def check_draft(path: Path, tokenizer: ChatTokenizer) -> None:
    """Raises QuantkitError where the draft model at `path` has other tokens than those of the model
    that it is to guess for. A head has none of its own."""
    if not is_head(read_json(path / "config.json")):
        check_same_ids(tokenizer.tokenizer, ChatTokenizer(path).tokenizer, tokenizer.path, path)


def load_draft(path: Path, loaded: LoadedModel, options: EngineOptions) -> LoadedModel | LoadedHead:
    """What guesses, at `path`, whole on this rank, for the model that is `loaded`. Raises
    QuantkitError where it cannot guess for that."""
    if is_head(read_json(path / "config.json")):
        return load_head(path, loaded, options)
    draft = load_model(
        path,
        device=options.device,
        backend=options.backend,
        dtype=options.dtype,
        cache=options.cache,
    )
    remedy = "bring another draft model"
    if draft.config.keeps_states:
        told = (
            f"{path} has layers whose state is of all the text before a token, which cannot be "
            "taken back where a guess is wrong"
        )
        raise QuantkitError(told, remedy)
    own, other = draft.cache_layout.block_size, loaded.cache_layout.block_size
    if own != other:
        raise QuantkitError(
            f"{path} keeps {own} tokens in a block of its cache here, {options.model_path} keeps "
            f"{other}",
            remedy,
        )
    return draft


def make_drafter(
    draft: LoadedModel | LoadedHead,
    loaded: LoadedModel,
    plan: CachePlan,
    runner: Runner,
    count: int,
    parallel: Parallel,
    *,
    shared: bool,
    capture: Capture | None = None,
) -> Drafter:
    """What guesses `count` tokens a step with what was brought, over a cache of as many blocks as
    that of the model that `runner` computes.
    shared, capture: as `ModelDrafter` and `Runner` have them."""
    if isinstance(draft, LoadedHead):
        return draft.drafter(plan, runner, count, parallel, capture)
    own = Runner(
        SameTokens(draft.model, loaded.config.vocab_size), draft.new_cache(plan.num_blocks), capture
    )
    return ModelDrafter(
        own, runner, count, parallel, reach=draft.config.max_position_embeddings, shared=shared
    )
