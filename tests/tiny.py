"""The model most tests use: every part of GPT-2, small enough to run in milliseconds."""

from model import GPTConfig

TINY = GPTConfig(vocab_size=65, block_size=16, n_layer=2, n_head=2, n_embd=32)
