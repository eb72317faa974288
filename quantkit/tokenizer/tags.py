"""What a reasoning model puts around its thoughts. Without imports: graders read replies where no tokenizer is installed."""

THINK, END_THINK = "<think>", "</think>"
