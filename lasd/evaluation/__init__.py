"""Measuring: prompts x (transformers' generate, plain decoding, methods) -> speed, tokens per step and exactness."""
