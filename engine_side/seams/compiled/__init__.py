"""Effects of vLLM's compiler on a tapped model: fusions that taps end, the stream in staging, router logits."""
