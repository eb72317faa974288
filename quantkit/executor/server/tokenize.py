"""/tokenize and /detokenize, as vLLM has them."""

from functools import partial
from typing import Annotated

from pydantic import Field

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.executor.server.intake import ApiError, Intake, or_refuse, parse, valid
from quantkit.executor.server.protocol import Exact, Messages, chat_messages

_MAX_IDS = 1 << 20


class TokenizeRequest(Exact):
    """A text, or a conversation that the chat template makes a text of. add_special_tokens: whether
    a text gets the model's own."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    tools: list[JsonObject] = Field(default_factory=list)


class DetokenizeRequest(Exact):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=_MAX_IDS, fail_fast=True)]


def tokenize(intake: Intake, raw: bytes) -> JsonObject:
    """Raises ApiError, or QuantkitError, for what has no tokens."""
    body = valid(parse(raw), TokenizeRequest)
    intake.check_model(body.model)
    tokenizer = intake.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise QuantkitError(
            "the request holds neither or both of prompt and messages", "send one of them"
        )
    if body.messages is not None:
        variables: JsonObject = {
            "add_generation_prompt": body.add_generation_prompt,
            **body.chat_template_kwargs,
        }
        variables |= {"tools": body.tools} if body.tools else {}
        text = intake.rendered(chat_messages(body.messages), variables)
        ids = intake.encoded(text, tokenizer.encode_rendered)
    else:
        encode = tokenizer.encode if body.add_special_tokens else tokenizer.encode_rendered
        ids = intake.encoded(body.prompt or "", encode)
    strings = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": intake.context,
        "tokens": ids,
        "token_strs": strings,
    }


def detokenize(intake: Intake, raw: bytes) -> JsonObject:
    """Raises ApiError, or QuantkitError, for what is no text."""
    body = valid(parse(raw), DetokenizeRequest)
    intake.check_model(body.model)
    size = intake.tokenizer.tokenizer.get_vocab_size()
    if not all(0 <= token < size for token in body.tokens):
        raise ApiError(
            400, f"tokens holds an id outside 0..{size - 1}", "invalid_request", "tokens"
        )
    decode = partial(intake.tokenizer.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": or_refuse(decode, "the tokens cannot be decoded")}
