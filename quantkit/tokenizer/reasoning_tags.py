"""Tags around the reasoning of models. Imports nothing: graders run where no tokenizer is
installed."""

THINK, END_THINK = "<think>", "</think>"

REASONING_TAGS = (
    (THINK, END_THINK),  # DeepSeek-R1, Qwen3, GLM and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),
    ("◁think▷", "◁/think▷"),  # Kimi
    ("[THINK]", "[/THINK]"),  # Magistral
    ("[unused16]", "[unused17]"),  # openPangu
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    # gpt-oss; what follows up to <|message|> belongs to the tag
    ("<|channel|>analysis", "<|channel|>final"),
    ("<|channel|>commentary", "<|channel|>final"),
    ("<|channel>thought", "<channel|>"),  # Gemma
)
"""Pairs of opening and closing tags, as the models write them."""
