"""Self-distillation: prompts in, the model's own answers out, as token ids with a loss mask."""
