"""What vLLM's compiler makes of a tapped model: fusions that taps end, the stream in staging, router logits."""
